"""Which adapters act in the forwards of a step: those that its requests have chosen, side by side where the model's
layers can do that, else one forward for each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hfpaged.adapter_choice import BASE, AdapterChoices
from hfpaged.compat import transformers_model
from hfpaged.engine.adapter_mixing import MixedLayers
from hfpaged.engine.adapter_trial import row_of, why_not_mixed
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.piece import Piece
from hfpaged.errors import MixedForwardError

logger = logging.getLogger("hfpaged")


class AdapterRouter:
    """Runs forwards of `runner` for sequences whose requests chose adapters. `make_spare` makes another runner of the
    model, to try out with a few tokens whether adapters can be mixed, when there are new ones.

    why_apart   why each adapter gets a forward of its own; empty where several share one
    """

    def __init__(self, runner: ModelRunner, make_spare: Callable[[], ModelRunner]) -> None:
        self._runner, self._make_spare = runner, make_spare
        self.why_apart = "the model is compiled" if _is_compiled(runner.model) else ""
        self._tried: dict[str, Any] = {}
        self._look()

    @property
    def model(self) -> nn.Module:
        """What forwards run through."""
        return self._runner.model

    def check(self, adapter: str | None) -> None:
        """From any thread: raises InvalidConfigError for an adapter that a request cannot choose."""
        if adapter is not None:
            choices = self._choices
            (choices if choices.are_current else AdapterChoices(self._runner.model)).check(adapter)

    @contextmanager
    def chosen(self, adapter: str | None) -> Iterator[None]:
        """Inside the model is as its owner would have it for this adapter. Raises AdapterLostError."""
        if adapter is not None:
            self._look_again({adapter})
        with nullcontext() if adapter is None else self._choices.chosen(adapter):
            yield

    def forward(self, pieces: Many[Piece]) -> Tensor:
        """As ModelRunner.forward, each piece with the adapter that its request chose. Raises AdapterLostError too."""
        chosen = {piece.adapter for piece in pieces}
        if chosen == {None}:
            return self._runner.forward(pieces)
        if len(chosen) == 1:
            with self.chosen(*chosen):
                return self._runner.forward(pieces)
        self._look_again(chosen)
        if not self.why_apart and self._runner.would_pack(pieces):
            try:
                with self._mixed.over(row_of(pieces)):
                    return self._runner.forward(pieces)
            except MixedForwardError as error:
                self._stop_mixing(error.reason)
        return self._apart(pieces)

    def describe(self) -> str:
        """For people."""
        choices = self._choices
        told = [f"{', '.join(choices.names)} (side by side)" if choices.names else ""]
        if choices.names and self.why_apart:
            told = [f"{', '.join(choices.names)} (one forward for each: {self.why_apart})"]
        told += [f"not {name}: {fault}" for name, fault in choices.faults.items()]
        return "; ".join(filter(None, told)) or "none"

    def _apart(self, pieces: Many[Piece]) -> Tensor:
        """A forward for each adapter, all or none; logits in the order of the pieces."""
        order = list(dict.fromkeys(piece.adapter for piece in pieces))
        places = [[at for at, piece in enumerate(pieces) if piece.adapter == adapter] for adapter in order]
        logits = self._runner.in_parts([[pieces[at] for at in group] for group in places], self.forward)
        rows: dict[int, Tensor] = {}
        for group, part in zip(places, logits, strict=True):
            rows.update(zip(group, part.split([pieces[at].logits for at in group]), strict=True))
        return torch.cat([rows[at] for at in range(len(pieces))])

    def _look_again(self, chosen: set[str | None]) -> None:
        if not self._choices.are_current:
            self._look()
        self._choices.check_there(chosen)

    def _look(self) -> None:
        choices = self._choices = AdapterChoices(self._runner.model)
        head = transformers_model(self._runner.model).get_output_embeddings()
        self._mixed = MixedLayers(choices.layers, head)
        untried = [n for n, c in choices.configs({*choices.names}).items() if self._tried.get(n) is not c]
        if untried and not self.why_apart and self._runner.packs:
            reason = why_not_mixed(self._make_spare(), choices, self._mixed, [*untried, BASE])
            if reason:
                self._stop_mixing(reason)
        self._tried = choices.configs({*choices.names})

    def _stop_mixing(self, reason: str) -> None:
        self.why_apart = reason
        logger.warning(
            "%s: %s: requests for different adapters are computed one adapter after the other, not side by side "
            "(said once)", type(transformers_model(self._runner.model)).__name__, reason,
        )  # fmt: skip


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile holds what its layers did when it looked at them."""
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules())
