"""One forward for a step: all its tokens side by side, logits only where somebody samples.

Models whose attention does not go through our kernels cannot take several sequences in one row. Whether a model can is
tried once with two short sequences, and a forward that meets a case which the kernels do not know is computed again one
sequence at a time: the same result, never a wrong one.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfpaged import compat
from hfpaged.cache import PagedCache
from hfpaged.engine.schedule import Scheduled
from hfpaged.errors import InvalidConfigError, PackedForwardError, UnsupportedModelError
from hfpaged.packed_cache import PackedCache
from hfpaged.sequence import Sequence

logger = logging.getLogger("hfpaged")

# Tokens of the sequences with which packing is tried, and how far their logits may be from those of each alone.
TRIAL = (5, 3)
TOLERANCE = 2e-2


class Piece:
    """Tokens of one sequence in a forward. `logits`: of how many of its last tokens they are wanted."""

    __slots__ = ("blocks", "logits", "start", "token_ids")

    def __init__(self, blocks: Sequence, start: int, token_ids: Many[int], logits: int) -> None:
        self.blocks, self.start, self.token_ids, self.logits = blocks, start, token_ids, logits


def piece_of(work: Scheduled, logits: int) -> Piece:
    """What of a sequence a step computes, its draft at the end."""
    seq = work.seq
    assert seq.blocks is not None
    stop = work.start + work.count - len(seq.draft)
    ids = seq.tokens[work.start : stop]
    return Piece(seq.blocks, work.start, [*ids, *seq.draft] if seq.draft else ids, logits)


class ModelRunner:
    """Runs forwards of `model` over sequences in the pool of `cache`.

    Raises InvalidConfigError for a model in training mode, UnsupportedModelError for layers that keep more than keys
    and values.
    """

    def __init__(self, model: nn.Module, cache: PackedCache) -> None:
        self.model, self.cache = model, cache
        self.seconds = 0.0  # in forwards of the model, all together
        self._config = compat.transformers_model(model).config
        if model.training:
            raise InvalidConfigError("the model is in training mode, with dropout; call model.eval() first")
        if cache.keeps_state:
            raise UnsupportedModelError(
                f"{type(compat.transformers_model(model)).__name__} has layers with a state beside keys and values, "
                "which lies in no block and cannot be batched here; use generate(past_key_values=PagedCache(model))"
            )
        names = inspect.signature(compat.transformers_model(model).forward).parameters
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names
        self._cache_name = compat.cache_argument()
        self._longest = compat.longest_with_same_positions(self._config)
        self.packs = self._takes_positions
        self.why_separate = "" if self.packs else "its forward takes no position_ids"

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return compat.transformers_model(self.model).device

    def forward(self, pieces: Many[Piece]) -> Tensor:
        """Store the tokens of all pieces, those with one first, and return logits [wanted, vocab] in their order.

        Raises OutOfBlocksError and whatever the model raises; the sequences are as before then.
        """
        if len(pieces) > 1 and self.packs and not self._depends_on_length(pieces):
            try:
                return self._packed(pieces)
            except PackedForwardError as error:
                self._stop_packing(error.reason)
        return torch.cat([self._packed([piece]) for piece in pieces]) if len(pieces) > 1 else self._packed(pieces)

    @torch.no_grad()
    def try_out(self) -> None:
        """Let a pool that was promised memory learn how large its blocks are, and compare two short sequences side by
        side with each alone, so that a model that mixes them is found out.
        """
        if not self.cache.pool.num_blocks:
            first = PagedCache(self.model, pool=self.cache.pool, prefix_sharing=False)
            self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), **{self._cache_name: first})
            first.free()
        if self.packs:
            alone, packed = self._trial(separate=True), self._trial(separate=False)
            if packed is not None and not torch.allclose(
                packed, alone, rtol=TOLERANCE, atol=TOLERANCE * float(alone.std())
            ):
                self._stop_packing("its tokens depend on what lies beside them")

    def _trial(self, separate: bool) -> Tensor:
        manager = self.cache.pool.manager
        vocab = self._config.get_text_config(decoder=True).vocab_size
        with self.cache.pool.changing():
            pieces = [
                Piece(manager.create(), 0, [(7 + 3 * i + number) % vocab for i in range(count)], 1)
                for number, count in enumerate(TRIAL)
            ]
        try:
            if separate:
                return torch.cat([self._packed([piece]) for piece in pieces])
            return self.forward(pieces)
        finally:
            with self.cache.pool.changing():
                for piece in pieces:
                    manager.free(piece.blocks)

    def _depends_on_length(self, pieces: Many[Piece]) -> bool:
        """Whether rotary positions of one sequence would change with the length of another."""
        return self._longest is not None and any(p.start + len(p.token_ids) > self._longest for p in pieces)

    def _stop_packing(self, reason: str) -> None:
        self.packs, self.why_separate = False, reason
        logger.warning(
            "%s: %s: its sequences are computed one by one, not side by side (said once)",
            type(compat.transformers_model(self.model)).__name__, reason,
        )  # fmt: skip

    @torch.no_grad()
    def _packed(self, pieces: Many[Piece]) -> Tensor:
        lengths = [piece.blocks.length for piece in pieces]
        self.cache.begin([(piece.blocks, len(piece.token_ids)) for piece in pieces])
        try:
            logits = self._logits(self._inputs(pieces), pieces)
        except BaseException:  # Ctrl-C too
            self.cache.undo(lengths)
            raise
        self.cache.end()
        return logits

    def _inputs(self, pieces: Many[Piece]) -> dict[str, Any]:
        if all(len(piece.token_ids) == 1 for piece in pieces):  # a step that only decodes: no arrays of one number
            ids = np.array([piece.token_ids[0] for piece in pieces], dtype=np.int64)
            positions = np.array([piece.start for piece in pieces], dtype=np.int64)
        else:
            ids = np.concatenate([np.asarray(piece.token_ids, dtype=np.int64) for piece in pieces])
            positions = np.concatenate([np.arange(p.start, p.start + len(p.token_ids)) for p in pieces])
        inputs = {"input_ids": self._tensor(ids)[None], "use_cache": True, self._cache_name: self.cache}
        if self._takes_positions:
            inputs["position_ids"] = self._tensor(positions)[None]
        return inputs

    def _logits(self, inputs: dict[str, Any], pieces: Many[Piece]) -> Tensor:
        """[wanted, vocab]"""
        ends = np.cumsum([len(piece.token_ids) for piece in pieces])
        if all(piece.logits == 1 for piece in pieces):
            wanted = ends - 1
        else:
            wanted = np.concatenate([np.arange(end - p.logits, end) for end, p in zip(ends, pieces, strict=True)])
        keep = self._tensor(wanted if len(wanted) else ends[-1:] - 1)
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
