"""A replay runs the scheduler and the pool of a server; who sleeps meanwhile changes nothing but the time it takes."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import COST, asked, run

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.layout import PoolLayout
from hfpaged.planner.replay import Replay
from hfpaged.planner.replay_engine import ReplayEngine
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.variant import Variant, variant_of

FREE = {"max_step_stretch": None, "max_num_queued_requests": None}


def plain(count=1, prompt=20, output=8, **fields):
    return Trace([TraceRequest(0.0, prompt, output, **fields) for _ in range(count)], 4)


def same(outcome):
    return {name: value for name, value in outcome.as_json().items() if name != "wall_seconds"}


@st.composite
def traces(draw):
    """Requests that begin alike, of several tenants and samples, some of which come at the same moment."""
    chance = random.Random(draw(st.integers(0, 10**6)))
    chunk = draw(st.sampled_from([1, 4, 16]))
    heads = [[chance.randrange(9) for _ in range(chance.randrange(40))] for _ in range(3)]
    time, requests = 0.0, []
    for _ in range(draw(st.integers(1, 14))):
        time += chance.choice([0.0, 0.0, 0.02, 0.3])
        prompt = chance.choice(heads) + [chance.randrange(9) for _ in range(chance.randrange(1, 30))]
        answer = [chance.randrange(9) for _ in range(chance.randrange(1, 50))]
        sizes = {"tenant": chance.randrange(2), "n": chance.choice([1, 1, 1, 3]), "priority": chance.randrange(2)}
        requests.append(asked(prompt, answer, chunk, time, **sizes))
    return Trace(requests, chunk)


WINDOWS = [(None,), (None, 8), (24,), (12, 40, None)]
VARIANTS = st.builds(
    Variant,
    num_blocks=st.integers(24, 150),
    block_size=st.sampled_from([4, 8, 16]),
    windows=st.sampled_from(WINDOWS),
    max_num_seqs=st.integers(3, 9),
    max_num_batched_tokens=st.sampled_from([9, 32, 500]),
    max_num_queued_requests=st.sampled_from([None, 2]),
    max_step_stretch=st.sampled_from([None, 2.0]),
    prefix_sharing=st.booleans(),
    by_priority=st.booleans(),
    rate=st.sampled_from([0.2, 1.0, 30.0]),
    replicas=st.sampled_from([1, 1, 3]),
)


@settings(max_examples=60, deadline=None)
@given(traces(), VARIANTS)
def test_sleeping_gives_the_same_as_steps_in_which_all_are_awake(trace, variant):
    slept, _ = run(trace, variant)
    awake, _ = run(trace, variant, lets_sleep=False)
    assert same(slept) == same(awake)
    assert slept.finished + slept.refused + slept.too_long == slept.requests == len(trace.requests)


class Counting(ReplayEngine):
    """Counts sequences that were awake in its steps."""

    def __init__(self, *parts, **options):
        super().__init__(*parts, **options)
        self.awake = 0

    def _sample(self, work):
        self.awake += len(work)
        super()._sample(work)


def test_who_only_decodes_is_asleep_in_most_steps():
    trace, variant = plain(8, prompt=16, output=160), Variant(200, max_num_seqs=8, **FREE)
    slept, sleeping = run(trace, variant, engine=Counting)
    awake, _ = run(trace, variant, engine=Counting, lets_sleep=False)
    assert same(slept) == same(awake)
    assert slept.steps == 160
    assert sleeping.awake < 8 * 160 / 5


def test_the_time_of_one_request_is_that_of_its_steps():
    outcome, _ = run(plain(1, prompt=20, output=4), Variant(50, **FREE))
    steps = [COST.seconds(20, 0, 20), *(COST.seconds(0, 1, 20 + more) for more in (1, 2, 3))]
    assert outcome.ttft.p50 == pytest.approx(steps[0])
    assert outcome.duration.p50 == pytest.approx(sum(steps)) == outcome.seconds == outcome.busy
    assert outcome.gap.mean == pytest.approx(sum(steps[1:]) / 3)
    assert outcome.gap.p50 == pytest.approx(steps[2], rel=0.01)
    assert (outcome.steps, outcome.mean_batch, outcome.output_tokens_per_second) == (4, 1, 4 / sum(steps))


def test_a_common_prefix_is_a_hit_for_all_but_the_first_and_nothing_without_sharing():
    first = asked(range(40), range(9), 4)
    second = asked([*range(32), 77, 78], range(9), 4, arrival=5.0)
    outcome, _ = run(Trace([first, second], 4), Variant(60, block_size=8, **FREE))
    assert (outcome.hit_tokens, outcome.queried_tokens) == (32, 74)
    apart, _ = run(Trace([first, second], 4), Variant(60, block_size=8, prefix_sharing=False, **FREE))
    assert (apart.hit_tokens, apart.queried_tokens) == (0, 0)


def test_a_next_turn_hits_the_answer_before_where_the_trace_knows_it():
    turn = asked(range(16), range(100, 116), 4)
    following = asked([*range(16), *range(100, 116), 5], [1], 4, arrival=9.0)
    known, _ = run(Trace([turn, following], 4), Variant(60, block_size=4, **FREE))
    assert known.hit_tokens == 28  # the last answered token was never stored, and with it the block that it would fill
    unknown, _ = run(Trace([turn._replace(answer_hashes=()), following], 4), Variant(60, block_size=4, **FREE))
    assert unknown.hit_tokens == 16


def test_a_small_pool_preempts_and_says_what_is_computed_again():
    trace = plain(6, prompt=16, output=64)
    small, _ = run(trace, Variant(12, block_size=8, max_num_seqs=6, prefix_sharing=False, **FREE))
    large, _ = run(trace, Variant(200, block_size=8, max_num_seqs=6, prefix_sharing=False, **FREE))
    assert large.preemptions == large.recomputed_tokens == 0
    assert small.preemptions > 0 < small.recomputed_tokens
    assert small.seconds > large.seconds
    assert small.output_tokens_per_second * small.seconds == pytest.approx(6 * 64)


def test_a_full_queue_refuses_and_what_never_fits_is_told():
    full, _ = run(plain(9), Variant(50, max_num_seqs=2, max_num_queued_requests=3, max_step_stretch=None))
    assert (full.finished, full.refused) == (5, 4)
    outcome, _ = run(Trace([*plain(2).requests, TraceRequest(0.0, 900, 8)], 4), Variant(50, **FREE))
    assert (outcome.finished, outcome.too_long) == (2, 1)


def test_waste_is_what_the_last_blocks_leave_empty():
    outcome, _ = run(plain(4, prompt=1, output=128), Variant(90, block_size=64, **FREE))
    finer, _ = run(plain(4, prompt=1, output=128), Variant(90, block_size=4, **FREE))
    assert 0.3 < outcome.waste < 0.4
    assert 0.01 < finer.waste < 0.04


def test_arrivals_come_as_much_faster_as_the_rate_says():
    trace = Trace([TraceRequest(float(second), 8, 2) for second in range(10)], 4)
    slow, _ = run(trace, Variant(50, **FREE))
    fast, _ = run(trace, Variant(50, rate=10.0, **FREE))
    assert slow.seconds > 9
    assert fast.seconds == pytest.approx(0.9, abs=0.2)


def test_ctrl_c_gives_what_is_known_so_far():
    def interrupt(done):
        raise KeyboardInterrupt

    trace = plain(5000, prompt=64, output=200)
    outcome = Replay(trace, Variant(300, **FREE), COST, interrupt).run()
    assert outcome.was_interrupted
    assert outcome.finished < 5000
    assert outcome.steps > 0


def test_a_pool_of_bytes_leaves_room_for_what_sequences_keep_outside_of_blocks():
    layout = PoolLayout("int8", 8, (None, 64), 1000, state_bytes=50)
    variant = variant_of(layout, 100_000, max_num_seqs=100)
    assert (variant.num_blocks, variant.prefix_sharing, variant.pool_tokens) == (95, False, 376)
    with pytest.raises(InvalidConfigError, match="no room for a block of 1000 B in each of 2 layer groups"):
        variant_of(layout, 6_000, max_num_seqs=100)
    with pytest.raises(InvalidConfigError, match="as many tokens as sequences"):
        Variant(10, max_num_seqs=8, max_num_batched_tokens=4)


def test_a_replay_needs_neither_torch_nor_ray():
    code = "import sys, hfpaged.planner.replay; print(sorted({'torch', 'numpy', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
