"""A batcher whose model is a rule: blocks, queues and sampling are real, forwards cost nothing, and what must come out
of each request is known without any model.
"""

from __future__ import annotations

from unittest import mock

import tiny_models
import torch

from hfpaged import ContinuousBatcher
from hfpaged.engine import events as ev

SURE = 60.0  # the logit of the one token that may come: sampling takes it as well
FINAL = (ev.Finished, ev.Aborted, ev.Failed)


def next_token(token: int, position: int) -> int:
    """What follows `token` at `position`: five tokens that repeat for a while, so that guesses are right at times."""
    return 3 + (token + position // 9) % 5


def going_on(prompt: list[int], count: int, ends: tuple[int, ...] = ()) -> list[int]:
    """The new tokens of a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class StubBatcher(ContinuousBatcher):
    """Of a tiny model that is never run. Each forward is checked against what was promised of it, and noted.

    forwards   (sequences, tokens) of each
    finals     the final events, by request
    """

    def __init__(self, name: str = "llama", **sizes) -> None:
        with mock.patch("hfpaged.engine.assembly.try_out"):
            super().__init__(tiny_models.shared(name), prepack=False, **{"max_step_stretch": None} | sizes)
        if self.pool.swapping:
            self._make_stores()
        self.forwards: list[tuple[int, int]] = []
        self.finals: dict[str, list[ev.RequestEvent]] = {}
        self.before_forward = lambda: None
        self._parts.runner._logits = self._logits
        self.hooks.append(self._note)

    @property
    def scheduler(self):
        return self._parts.scheduler

    def _logits(self, given):
        self.before_forward()
        self.forwards.append((len(given.counts), len(given.token_ids)))
        sequences = self._parts.runner.cache._rows.sequences
        for sequence, start, count in zip(sequences, given.starts, given.counts, strict=True):
            assert sequence.length == start + count, "the pool has no room for these tokens"
        positions = given.positions
        chosen = [next_token(int(given.token_ids[index]), int(positions[index])) for index in given.wanted]
        logits = torch.zeros(len(chosen), tiny_models.VOCAB)
        logits[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = SURE
        return logits

    def _make_stores(self):
        """What is swapped lies somewhere, though nobody writes it: no forward does."""
        like = torch.zeros(1, 1, 0, 2)
        for group in self.pool.groups:
            for place, layer in enumerate(group.layers):
                self.pool.settle_size(layer, self.pool.storage.store(place, like, like, layer))
        self.pool.reserve_all()

    def _note(self, event):
        if isinstance(event, FINAL):
            self.finals.setdefault(event.request_id, []).append(event)

    def check_empty(self) -> None:
        """All is given back, and nothing is kept of those who are gone."""
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
        assert not self.has_work
        assert not self.pool.manager._sequences
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        assert not len(self.scheduler._admitter.promises)
        assert not self.loop._requests
        assert not self.loop._listeners
        assert all(len(events) == 1 for events in self.finals.values())
