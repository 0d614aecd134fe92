"""A cache that forgets, around the forwards of its model: texts without end in constant memory.

StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): a row keeps its first tokens, the sinks, and the last ones, its
window. Positions are those within what is kept: the sinks stand right before the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.admission import cut_inputs
from hfpaged.content import Content, read_content
from hfpaged.errors import StreamingError
from hfpaged.prefix_sharing import why_whole
from hfpaged.rows import Rows
from hfpaged.sinks import move_sinks, others_given, read_sinks
from hfpaged.step import StepPlan
from hfpaged.stream_rule import SinkTokens, StreamRule, chunk_size

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache


class Streaming:
    """Before each forward the blocks that no token of it needs are released; longer prompts are computed in pieces."""

    def __init__(self, rules: tuple[StreamRule | None, ...], block_size: int) -> None:
        self.rules, self.block_size = rules, block_size
        rule = next(rule for rule in rules if rule)
        self.window, self.sinks = rule.window, rule.kept * block_size
        self.chunk = chunk_size(rule.window, block_size)
        self._learnt: list[SinkTokens | None] | None = None

    def fork(self) -> Streaming:
        """For a copy of the cache."""
        return Streaming(self.rules, self.block_size)

    def prepare(
        self, cache: PagedCache, rows: Rows, model: PreTrainedModel, inputs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """A forward with `inputs` is to come: forget what it shall not see. Returns the arguments of what is left of
        it, None for all: of a long prompt all pieces but the last are computed here, on the very cache.

        Raises StreamingError, and what forwards raise; if one of the pieces does, the cache is empty.
        """
        left = self._compute_pieces(cache, rows, model, inputs)
        with rows.pool.changing():
            for sequence in rows.sequences:
                for table in sequence.tables:
                    if table.rule:
                        table.release_before(table.length - table.rule.window + 1)
        move_sinks(cache, rows, model)
        return left

    def announce(self, rows: Rows, plan: StepPlan | None, inputs: Mapping[str, Any]) -> None:
        """The forward comes now. Raises StreamingError where it does not tell what the sinks are."""
        self._learnt = read_sinks(rows, inputs, plan.kept if plan else None, self.sinks) if self.sinks else None

    def end_step(self, rows: Rows, completed: bool) -> None:
        """The forward is over."""
        learnt, self._learnt = self._learnt, None
        if completed and learnt is not None and len(learnt) == rows.batch:
            for sequence, sinks in zip(rows.sequences, learnt, strict=True):
                sequence.sinks = sinks

    def _compute_pieces(
        self, cache: PagedCache, rows: Rows, model: PreTrainedModel, inputs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        width, past = _width(inputs), rows.length
        cuts = self._cuts(past, width)
        if not cuts:
            return None
        content = self._readable_in_pieces(model, inputs, width, cuts[0])
        if width - cuts[-1] < inputs["logits_to_keep"]:
            cuts[-1] = width - inputs["logits_to_keep"]
        try:
            for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
                self._compute(model, inputs, content, past, slice(start, stop))
        except BaseException:
            cache.free()  # what is forgotten cannot be brought back, and half of a prompt must not stay unnoticed
            raise
        return cut_inputs(inputs, content, slice(None), slice(cuts[-1], None))

    def _cuts(self, past: int, width: int) -> list[int]:
        """Where to cut `width` new positions: as much as is seen whole comes first, chunk by chunk follows."""
        first = max(self.chunk, self.sinks + self.window - past)
        return list(range(first, width, self.chunk))

    def _readable_in_pieces(self, model: PreTrainedModel, inputs: Mapping[str, Any], width: int, most: int) -> Content:
        why, content = why_whole(inputs, model.config), read_content(inputs)
        if why is None and inputs["logits_to_keep"] > self.chunk:
            why = f"the caller reads the last {inputs['logits_to_keep']} logits, a piece has {self.chunk}"
        others = others_given(inputs, content) if content else []
        if why is None and not (content and all(isinstance(inputs[name], bool | int | float) for name in others)):
            why = "there are inputs that have no place among the tokens"
        mask = inputs.get("attention_mask")
        if why is None and mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            why = "the attention mask is not [batch, length]"
        if why is not None:
            raise StreamingError(
                f"{width} new positions are more than the {most} that a cache with a window of {self.window} takes at "
                f"once, and they cannot be computed in pieces: {why}. Pass them in forwards of at most {most}, then "
                f"{self.chunk} positions"
            )
        assert content is not None
        return content

    @torch.no_grad()
    def _compute(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], content: Content, past: int, columns: slice
    ) -> None:
        piece = cut_inputs(inputs, content, slice(None), columns)
        mask = piece.get("attention_mask")
        if mask is not None and mask.shape[1] == past + content.shape[1]:
            piece["attention_mask"] = mask[:, : past + columns.stop]
        model(**piece | {"logits_to_keep": 1})


def _width(inputs: Mapping[str, Any]) -> int:
    """New positions of a forward."""
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    return int(given.shape[1]) if isinstance(given, Tensor) and given.ndim > 1 else 0
