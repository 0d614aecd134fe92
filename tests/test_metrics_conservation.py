"""Counters obey conservation, whatever is added, refused, aborted, preempted, dropped: after each operation they are
what an account of all events, and the state of the engine itself, say.
"""

from __future__ import annotations

import gc
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from metrics_figures import Figures
from stub_batcher import StubBatcher

from hfpaged.engine import events as ev
from hfpaged.engine import registry
from hfpaged.errors import BatcherClosedError, HfpagedError
from hfpaged.telemetry._prometheus import families_of

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "greedy": {"do_sample": False},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "samples": {"do_sample": True, "n": 3},
    "beams": {"do_sample": False, "num_beams": 2},
    "scored": {"do_sample": False, "prompt_logprobs": 0},
}
MODELS = {"llama": 1, "gpt_oss": 2}  # layer groups
REQUESTS = st.fixed_dictionaries(
    {
        "common": st.sampled_from((0, 4, 9, 14)),
        "own": st.lists(st.integers(3, 9), min_size=1, max_size=10),
        "new": st.sampled_from((20, 12, 1, 5)),
        "kind": st.sampled_from(("greedy", *KINDS)),
    }
)
ENDS = ("hfpaged_requests_finished_total", "hfpaged_requests_aborted_total")
FINAL = (ev.Finished, ev.Aborted, ev.Failed)


class Account:
    """A second opinion: it keeps all events and requests, and counts them anew whenever it is asked."""

    def __init__(self, batcher):
        self.events, self.requests = [], {}
        self.loop = batcher.loop
        batcher.hooks.append(self)

    def __call__(self, event):
        self.events.append(event)
        if isinstance(event, ev.Arrived):
            self.requests[event.request_id] = self.loop.requests[event.request_id]

    def of(self, *kinds):
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def ended(self):
        return self.of(*FINAL)

    @property
    def in_flight(self):
        return {event.request_id for event in self.of(ev.Arrived)} - {event.request_id for event in self.ended}


def holds_blocks(request):
    return any(seq.blocks is not None for group in request.groups for seq in group.sequences)


class Counting(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(MODELS)),
        block_size=st.sampled_from((1, 2, 4)),
        num_tokens=st.integers(40, 56),
        seats=st.sampled_from((8, 5, 3)),
        more_budget=st.sampled_from((20, 60, 3)),
        shares=st.sampled_from((True, True, False)),
    )
    def begin(self, name, block_size, num_tokens, seats, more_budget, shares):
        num_blocks = num_tokens // block_size * MODELS[name]
        self.batcher = StubBatcher(
            name, block_size=block_size, num_blocks=num_blocks, max_num_seqs=seats,
            max_num_batched_tokens=seats + more_budget, prefix_sharing=shares,
        )  # fmt: skip
        self.name = self.batcher.tally.model_name
        self.account = Account(self.batcher)
        self.before = dict(registry.tallies()[self.name].sums.numbers)
        self.accepted = self.refused = 0
        for number in range(5):  # together more than the pool holds: sooner or later somebody is preempted
            self.batcher.add_request([30 + number] * 6, max_new_tokens=20, do_sample=False)
            self.accepted += 1

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def add(self, requests):
        for request in requests:
            prompt = [10 + number for number in range(request["common"])] + request["own"]
            try:
                self.batcher.add_request(prompt, max_new_tokens=request["new"], **KINDS[request["kind"]])
                self.accepted += 1
            except HfpagedError:  # longer than the pool, more sequences than seats, closed
                self.refused += 1

    @rule()
    def add_one_that_is_refused(self):
        with pytest.raises(HfpagedError):
            self.batcher.add_request([3] * 500)
        self.refused += 1

    @precondition(lambda self: self.account.in_flight)
    @rule(data=st.data())
    def abort(self, data):
        self.batcher.abort(data.draw(st.sampled_from(sorted(self.account.in_flight))))

    @rule(count=st.sampled_from((1, 3, 10, 20)))
    def step(self, count):
        for _ in range(count):
            self.batcher.step()

    @rule(rarely=st.integers(0, 3))
    def a_forward_fails(self, rarely):
        if rarely != 2:
            return

        def fail():
            self.batcher.before_forward = lambda: None
            raise ValueError("broken")

        self.batcher.before_forward = fail
        self.batcher.step()
        self.batcher.before_forward = lambda: None

    @precondition(lambda self: not self.batcher.is_closed)
    @rule(rarely=st.integers(0, 9))
    def close(self, rarely):
        if rarely == 7:  # hypothesis likes 0
            self.batcher.close()
            with pytest.raises(BatcherClosedError):
                self.batcher.add_request([3, 4])
            self.refused += 1

    @invariant()
    def figures_agree(self):
        if not hasattr(self, "batcher"):
            return
        figures = self.figures = Figures(families_of(self.batcher))
        self.check_conservation(figures)
        self.check_series(figures)
        self.check_tokens(figures)
        self.check_waits(figures)
        self.check_pool(figures)

    def check_conservation(self, figures):
        account, batcher = self.account, self.batcher
        arrived, rejected = len(account.of(ev.Arrived)), len(account.of(ev.Rejected))
        assert rejected == self.refused
        unseen = len(batcher.loop._inbox)  # the next step will tell of them; they are there
        assert arrived + unseen == self.accepted
        assert figures("hfpaged_requests_received_total") == self.accepted + rejected
        assert figures("hfpaged_requests_rejected_total") == rejected
        assert figures("hfpaged_requests_aborted_total") == len(account.of(ev.Aborted))
        reasons = Counter(event.finish_reason for event in account.of(ev.Finished))
        reasons["error"] = len(account.of(ev.Failed))
        assert figures.by("hfpaged_requests_finished_total", "finish_reason") == {
            reason: reasons[reason] for reason in ("stop", "length", "error")
        }
        in_flight = {name: account.requests[name] for name in account.in_flight}
        running = {name for name, request in in_flight.items() if holds_blocks(request)}
        preempted = {group.request.request_id for group in batcher.scheduler.waiting if group.was_preempted} - running
        assert figures("hfpaged_requests_running") == len(running)
        assert figures("hfpaged_requests_waiting") == len(in_flight) - len(running) + unseen
        assert figures("hfpaged_requests_preempted") == len(preempted)
        assert figures("hfpaged_requests_received_total") == sum(
            figures(f"hfpaged_requests_{part}")
            for part in ("finished_total", "aborted_total", "rejected_total", "running", "waiting")
        )

    def check_series(self, figures):
        account = self.account
        ended = account.ended
        for name in ("duration_seconds", "queue_seconds", "prompt_tokens", "output_tokens"):
            assert figures(f"hfpaged_request_{name}_count") == len(ended)
        sequences = [seq for event in ended for seq in account.requests[event.request_id].sequences]
        assert figures("hfpaged_sequence_tokens_count") == len(sequences)
        assert figures("hfpaged_sequence_tokens_sum") == sum(len(seq.tokens) for seq in sequences)
        prompts = [len(account.requests[event.request_id].prompt) for event in ended]
        assert figures("hfpaged_request_prompt_tokens_sum") == sum(prompts)
        assert figures("hfpaged_request_output_tokens_sum") == sum(seq.num_new for seq in sequences)
        with_token = [request for request in account.requests.values() if request.first_token_time is not None]
        assert figures("hfpaged_time_to_first_token_seconds_count") == len(with_token)
        metrics = [event.metrics for event in ended]
        assert figures("hfpaged_kv_byte_seconds_total") == pytest.approx(sum(each.byte_seconds for each in metrics))
        assert figures("hfpaged_preemptions_total") == sum(each.preemptions for each in account.requests.values())
        assert figures("hfpaged_preempted_tokens_total") == sum(event.lost for event in account.of(ev.Preempted))

    def check_tokens(self, figures):
        requests = self.account.requests.values()
        admitted = [request for request in requests if request.admitted_time is not None]
        assert figures("hfpaged_prompt_tokens_total") == sum(len(request.prompt) for request in admitted)
        forwards = self.batcher.forwards
        assert figures("hfpaged_computed_tokens_total") == sum(tokens for _, tokens in forwards)
        assert figures("hfpaged_step_sequences_count") == len(forwards)
        assert figures("hfpaged_step_sequences_sum") == sum(sequences for sequences, _ in forwards)
        assert figures("hfpaged_step_duration_seconds_count") == len(forwards)
        by_phase = figures.by("hfpaged_computed_tokens_total", "phase")
        assert by_phase == figures.by("hfpaged_step_tokens_sum", "phase")
        if all(request.params.num_beams == 1 for request in requests):
            assert figures("hfpaged_generated_tokens_total") == sum(request.num_new for request in requests)

    def check_waits(self, figures):
        waited = Counter()
        for request in self.account.requests.values():
            waited.update(request.waits)
        found = figures.by("hfpaged_wait_seconds_total", "cause")
        assert found == pytest.approx({cause: waited[cause] for cause in found})

    def check_pool(self, figures):
        """Queries and hits count once for each request, when it is admitted first."""
        matches = self.account.of(ev.PrefixMatched)
        assert len({event.request_id for event in matches}) == len(matches)
        assert figures("hfpaged_prefix_lookups_total") == len(matches)
        assert figures("hfpaged_prefix_queried_tokens_total") == sum(
            len(self.account.requests[event.request_id].prompt) for event in matches
        )
        hits = [self.account.requests[event.request_id].num_cached_tokens for event in matches]
        assert figures("hfpaged_prefix_hit_tokens_total") == sum(hits)
        states = figures.by("hfpaged_kv_blocks", "state")
        assert sum(states.values()) == self.batcher.pool.num_blocks
        assert states["used"] == figures("hfpaged_kv_group_blocks", state="used")
        assert states["cached"] == figures("hfpaged_kv_group_blocks", state="cached")

    def teardown(self):
        """A batcher that is dropped while it works has given up what it had in flight, in the sums of its model."""
        if not hasattr(self, "batcher"):
            return
        figures, left = self.figures, len(self.account.in_flight) + len(self.batcher.loop._inbox)
        name, before = self.name, self.before
        del self.batcher, self.account
        gc.collect()
        after = registry.tallies()[name].sums
        gone = {key: after.numbers.get(key, 0) - before.get(key, 0) for key in after.numbers}
        assert gone["hfpaged_requests_aborted_total",] == figures("hfpaged_requests_aborted_total") + left
        assert gone["hfpaged_requests_received_total",] == figures("hfpaged_requests_received_total")
        assert all(number >= 0 for number in gone.values())
        finished = sum(number for key, number in gone.items() if key[0] == "hfpaged_requests_finished_total")
        assert finished == figures("hfpaged_requests_finished_total")
        ended = after.histograms["hfpaged_request_duration_seconds",].count
        assert ended == sum(after.numbers[key] for key in after.numbers if key[0] in ENDS)


TestCounting = Counting.TestCase
TestCounting.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
