"""One forward for a step: all its tokens side by side, logits only where somebody samples.

Models whose attention does not go through our kernels cannot take several sequences in one row, nor can layers with a
state, which would mix them. A forward that meets a case which the kernels do not know is computed again one sequence at
a time: the same result, never a wrong one.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from hfpaged import compat
from hfpaged.engine.decode_graphs import DecodeGraphs
from hfpaged.engine.piece import Piece, packed_input
from hfpaged.errors import InvalidConfigError, PackedForwardError
from hfpaged.packed_cache import PackedCache
from hfpaged.packed_plan import PackedInput, PackedPlan
from hfpaged.spread import input_device

logger = logging.getLogger("hfpaged")


class ModelRunner:
    """Runs forwards of `model` over sequences in the pool of `cache`. `packs`: several in one row; `why_separate` says
    why not. `whole_prompts`: whether all tokens of a prompt must come in one forward; `hfpaged.engine.trial` finds out.

    Raises InvalidConfigError for a model in training mode.
    """

    def __init__(self, model: nn.Module, cache: PackedCache) -> None:
        self.model, self.cache = model, cache
        self.graphs: DecodeGraphs | None = None
        self.lead: Callable[[PackedPlan], AbstractContextManager[None]] | None = None  # who has others follow
        self.seconds = 0.0  # in forwards of the model, all together
        self._config = compat.transformers_model(model).config
        if model.training:
            raise InvalidConfigError("the model is in training mode, with dropout; call model.eval() first")
        names = inspect.signature(compat.transformers_model(model).forward).parameters
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names
        self._cache_name = compat.cache_argument()
        self._longest = compat.longest_with_same_positions(self._config)
        self.whole_prompts = False
        self.why_separate = self._why_separate()
        self.packs = not self.why_separate

    def expect_length(self, longest: int | None) -> None:
        """Sequences get no longer than that. Where rotary positions change with a prompt's length (LongRoPE, dynamic
        NTK), one that is cut would have those of its chunks.
        """
        if self._longest is not None and (longest is None or longest > self._longest):
            self.whole_prompts = True

    def changes_between(self, first: int, last: int) -> int | None:
        """The length at which all rotary positions change while a sequence grows from `first` to `last` tokens."""
        is_crossed = self._longest is not None and first <= self._longest < last
        return self._longest if is_crossed else None

    @property
    def can_share(self) -> bool:
        """Whether a sequence can begin with blocks that another has filled."""
        return not self.cache.keeps_state and not self.whole_prompts

    @property
    def can_speculate(self) -> bool:
        """Whether several tokens can come to those that are there, and go again."""
        return self.can_share and self.cache.pool.residuals is None

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return input_device(compat.transformers_model(self.model))

    def forward(self, pieces: Many[Piece]) -> Tensor:
        """Store the tokens of all pieces, those with one first, and return logits [wanted, vocab] in their order.

        Raises OutOfBlocksError and whatever the model raises; the sequences are as before then, or have no token where
        they cannot go back.
        """
        if self.would_pack(pieces):
            try:
                return self._packed(pieces)
            except PackedForwardError as error:
                self.stop_packing(error.reason)
        if len(pieces) > 1:
            return torch.cat(self.in_parts([[piece] for piece in pieces], self._packed))
        return self._packed(pieces)

    def would_pack(self, pieces: Many[Piece]) -> bool:
        """Whether several pieces would lie side by side in one forward."""
        return len(pieces) > 1 and self.packs and not self._depends_on_length(pieces)

    def in_parts(self, parts: Many[Many[Piece]], forward: Callable[[Many[Piece]], Tensor]) -> list[Tensor]:
        """A forward for each part, all of them or none."""
        done = [piece for part in parts for piece in part]
        lengths = [piece.blocks.length for piece in done]
        logits: list[Tensor] = []
        try:
            for part in parts:
                logits.append(forward(part))
        except BaseException:
            count = sum(map(len, parts[: len(logits)]))
            self.cache.take_back([piece.blocks for piece in done[:count]], lengths[:count])
            raise
        return logits

    def check_model(self, is_due: bool) -> None:
        """It is due when new requests have come: the model may have been changed before."""
        if is_due and self.graphs is not None:
            self.graphs.check_model()

    def stop_packing(self, reason: str) -> None:
        """From now on one sequence at a time."""
        self.packs, self.why_separate = False, reason
        logger.warning(
            "%s: %s: its sequences are computed one by one, not side by side (said once)",
            type(compat.transformers_model(self.model)).__name__, reason,
        )  # fmt: skip

    def _why_separate(self) -> str:
        if self.cache.keeps_state:
            return "layers with a state beside keys and values"
        return "" if self._takes_positions else "its forward takes no position_ids"

    def _depends_on_length(self, pieces: Many[Piece]) -> bool:
        """Whether rotary positions of one sequence would change with the length of another."""
        return self._longest is not None and any(p.start + len(p.token_ids) > self._longest for p in pieces)

    @torch.no_grad()
    def _packed(self, pieces: Many[Piece]) -> Tensor:
        lengths = [piece.blocks.length for piece in pieces]
        self.cache.begin([(piece.blocks, len(piece.token_ids)) for piece in pieces])
        try:
            logits = self._recorded(pieces)
            if logits is None:
                given = packed_input(pieces)
                with self._leading(given):
                    logits = self._logits(given)
        except BaseException:  # Ctrl-C too
            self.cache.undo(lengths)
            raise
        self.cache.end()
        return logits

    def _recorded(self, pieces: Many[Piece]) -> Tensor | None:
        """[wanted, vocab] of a step that a graph computes; None for others."""
        if self.graphs is None or not self.packs or any(len(p.token_ids) != 1 or p.adapter for p in pieces):
            return None
        began = time.perf_counter()
        logits = self.graphs.logits([piece.token_ids[0] for piece in pieces], [piece.start for piece in pieces])
        self.seconds += time.perf_counter() - began
        wanted = [row for row, piece in enumerate(pieces) if piece.logits]
        return logits if logits is None or len(wanted) == len(pieces) else logits[wanted]

    def follow(self, plan: PackedPlan) -> None:
        """Take part in a forward of the process that leads. Raises what the model raises."""
        with torch.no_grad(), self.cache.following(plan):
            self._logits(plan.given)

    def _leading(self, given: PackedInput) -> AbstractContextManager[None]:
        """Around each forward: those who hold other heads of the model take part."""
        return nullcontext() if self.lead is None else self.lead(self.cache.plan(given))

    def _logits(self, given: PackedInput) -> Tensor:
        """[wanted, vocab]"""
        inputs = {"input_ids": self._tensor(given.token_ids)[None], "use_cache": True, self._cache_name: self.cache}
        if self._takes_positions:
            inputs["position_ids"] = self._tensor(given.positions)[None]
        wanted = given.wanted
        keep = self._tensor(wanted if len(wanted) else np.array([len(given.token_ids) - 1]))
        if self._takes_keep:
            inputs["logits_to_keep"] = keep
        began = time.perf_counter()
        logits: Tensor = self.model(**inputs).logits[0]
        self.seconds += time.perf_counter() - began
        if not self._takes_keep:
            logits = logits[keep.to(logits.device)]
        return logits[: len(wanted)]

    def _tensor(self, numbers: np.typing.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)
