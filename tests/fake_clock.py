"""A clock that stands until somebody moves it, in place of all the clocks of the engine."""

from __future__ import annotations

import sys


class FakeClock:
    """Seconds, from 1000 on."""

    def __init__(self, monkeypatch):
        from hfpaged import clock

        self.time = 1000.0
        real = clock.now
        for name, module in list(sys.modules.items()):
            if name.startswith("hfpaged") and getattr(module, "now", None) is real:
                monkeypatch.setattr(module, "now", self)

    def __call__(self):
        return self.time

    def tick_in_forwards(self, batcher, seconds=1.0):
        """Each forward takes so long, and nothing else any time; returns the blocks that were used in each."""
        runner, used = batcher._parts.runner, []
        forward = runner.forward

        def slow(pieces):
            logits = forward(pieces)
            used.append(batcher.pool.blocks.num_used)
            self.time += seconds
            return logits

        runner.forward = slow
        return used
