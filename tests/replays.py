"""Traces for tests, made of token ids that nobody would record."""

from __future__ import annotations

from array import array

from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.replay import Replay
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.trace_hashing import ChunkHasher
from hfpaged.planner.variant import Variant

COST = CostModel(0.01, 2e-4, 1e-3, 1e-5)
SECRET = bytes(16)


def asked(prompt, answer, chunk, arrival=0.0, **fields):
    """A request of these tokens."""
    hashes = [int(text, 16) for text in ChunkHasher(SECRET, chunk).hashes(b"", array("q", [*prompt, *answer])).hashes]
    known = len(prompt) // chunk
    return TraceRequest(
        arrival, len(prompt), len(answer), tuple(hashes[:known]), tuple(hashes[known:]), **fields
    )  # fmt: skip


def run(trace: Trace, variant: Variant, lets_sleep: bool = True, engine: type[ReplayEngine] = ReplayEngine):
    """(outcome, engine or fleet) of a replay; the books of all pools are in order at its end, and none holds blocks."""
    replay = Replay(trace, variant, COST, make=lambda *parts: engine(*parts, lets_sleep=lets_sleep))
    outcome = replay.run()
    assert replay.engine is not None
    for each in getattr(replay.engine, "engines", [replay.engine]):
        check_empty(each)
    return outcome, replay.engine


def check_empty(engine: ReplayEngine) -> None:
    engine.manager.check_integrity()
    engine.prefixes.check_integrity()
    assert engine.pool.num_used == 0
    assert not engine.manager.sequences
    assert not engine.has_work
    assert engine.sleepers.count == engine.sleepers.reserved == engine.sleepers.context == 0
    assert not len(engine.scheduler._admitter.promises)
