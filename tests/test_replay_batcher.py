"""The judge of a replay: the batcher itself, its blocks, queues and sampling, on the same requests at one moment."""

import pytest
from replays import asked, run
from stub_batcher import StubBatcher, going_on

from hfpaged.engine import events as ev
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.trace import Trace
from hfpaged.planner.variant import Variant

pytestmark = pytest.mark.usefixtures("one_thread")

# Prompts that begin alike, in the middle of a block too; some are the same, some begin with what others answer.
HEAD = [5, 6, 7, 3, 4] * 5
TURN = [*HEAD, 3, 9, 8, 7]
PROMPTS = [
    [*HEAD, 9, 8, 7],
    [*HEAD, 9, 9, 9, 9, 9, 4, 4],
    list(range(10, 40)),
    [*HEAD, 9, 8, 7],
    HEAD[:11] + [12] * 30,
    TURN,
    TURN + going_on(TURN, 12) + [11],
    [*list(range(10, 40)), 50],
    [13],
    HEAD + [3] * 60,
]
LENGTHS = [30, 12, 45, 30, 7, 12, 20, 1, 50, 25]

SIZES = {
    "plenty of everything": {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 512},
    "few blocks": {"num_blocks": 15, "max_num_seqs": 10, "max_num_batched_tokens": 64},
    "few seats": {"num_blocks": 200, "max_num_seqs": 3, "max_num_batched_tokens": 512},
    "a small token budget": {"num_blocks": 60, "max_num_seqs": 8, "max_num_batched_tokens": 11},
    "blocks of four": {"num_blocks": 31, "max_num_seqs": 10, "max_num_batched_tokens": 64, "block_size": 4},
    "a windowed model": {"num_blocks": 60, "max_num_seqs": 10, "max_num_batched_tokens": 64, "name": "gemma2"},
}


class Record:
    """What a batcher tells, in the order in which it does."""

    def __init__(self) -> None:
        self.admitted: list[str] = []
        self.preempted: list[tuple[str, int]] = []
        self.hits: dict[str, int] = {}
        self.steps: list[int] = []  # tokens of each

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Admitted):
            self.admitted.append(event.request_id)
        elif isinstance(event, ev.Preempted):
            self.preempted.append((event.request_id, event.lost))
        elif isinstance(event, ev.PrefixMatched):
            self.hits[event.request_id] = event.hit
        elif isinstance(event, ev.StepFinished):
            self.steps.append(event.num_tokens)


def of_batcher(requests, name="llama", **sizes) -> tuple[Record, tuple]:
    """What it tells of these (prompt, output, n), which all come before its first step; and its windows."""
    batcher = StubBatcher(name, **sizes)
    record = Record()
    batcher.hooks.append(record)
    for number, (prompt, length, count) in enumerate(requests):
        batcher.add_request(prompt, request_id=str(number), max_new_tokens=length, n=count, do_sample=count > 1)
    while batcher.has_work:
        batcher.step()
    batcher.check_empty()
    return record, tuple(group.window for group in batcher.pool.groups)


def of_replay(requests, windows, lets_sleep, **sizes) -> Record:
    record = Record()
    trace = Trace([asked(p, going_on(p, length), 1, n=count) for p, length, count in requests], 1)
    variant = Variant(windows=windows, max_step_stretch=None, max_num_queued_requests=None, **sizes)
    outcome, _ = run(trace, variant, lets_sleep, engine=telling(record))
    assert len(record.steps) == outcome.steps
    assert len(record.preempted) == outcome.preemptions
    assert sum(record.hits.values()) == outcome.hit_tokens
    return record


def telling(record: Record):
    """An engine that tells `record` what a batcher would."""

    class Telling(ReplayEngine):
        def __init__(self, *parts, **options):
            super().__init__(*parts, **options)
            schedule, stepped = self.scheduler.schedule, self.stats.stepped

            def told_schedule(budget):
                made = schedule(budget)
                record.preempted += [(group.request.request_id, lost) for group, lost in made.preempted]
                for group, _, found, _ in made.admitted:
                    record.admitted.append(group.request.request_id)
                    record.hits.setdefault(group.request.request_id, found)
                return made

            def told_step(sequences, prefill, decodes, seconds, used):
                record.steps.append(prefill + decodes)
                stepped(sequences, prefill, decodes, seconds, used)

            self.scheduler.schedule, self.stats.stepped = told_schedule, told_step

    return Telling


@pytest.mark.parametrize("lets_sleep", [True, False], ids=["asleep", "awake"])
@pytest.mark.parametrize("case", SIZES)
def test_a_replay_admits_hits_preempts_and_steps_as_the_batcher_does(case, lets_sleep):
    sizes = {"block_size": 8} | SIZES[case]
    requests = [(prompt, length, 1) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    told, windows = of_batcher(requests, **sizes)
    sizes.pop("name", None)
    replayed = of_replay(requests, windows, lets_sleep, **sizes)
    assert replayed.admitted == told.admitted
    assert replayed.hits == told.hits
    assert replayed.preempted == told.preempted
    assert replayed.steps == told.steps
    assert sum(told.hits.values()) > 50
    assert bool(told.preempted) == (case in ("few blocks", "blocks of four"))


def test_several_samples_of_a_prompt_fork_as_in_the_batcher():
    requests = [([*HEAD, 9], 12, 1), ([*HEAD, 9, 3], 20, 4), (list(range(10, 30)), 5, 2)]
    sizes = {"num_blocks": 60, "block_size": 8, "max_num_seqs": 5, "max_num_batched_tokens": 64}
    told, windows = of_batcher(requests, **sizes)
    replayed = of_replay(requests, windows, True, **sizes)
    assert (replayed.admitted, replayed.hits, replayed.preempted) == (told.admitted, told.hits, told.preempted)
    assert replayed.steps == told.steps
