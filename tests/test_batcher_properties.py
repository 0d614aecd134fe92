"""Any order of adding, aborting and stepping, over any sizes: the pool stays whole, each request comes to one end, in
order, and within a bounded number of steps.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stub_batcher import StubBatcher, going_on

from hfpaged.engine import events as ev
from hfpaged.errors import OutOfBlocksError, RequestTooLongError

pytestmark = pytest.mark.usefixtures("one_thread")


KINDS = {
    "greedy": {"do_sample": False},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "samples": {"do_sample": True, "n": 3},
    "best of": {"do_sample": True, "n": 1, "best_of": 2},
    "beams": {"do_sample": False, "num_beams": 2},
    "many beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "scored": {"do_sample": False, "prompt_logprobs": 0},
}
ENDS = (7,)  # of those that may stop early
MODELS = {"llama": 1, "mistral": 1, "gpt_oss": 2}  # layer groups: full, a window, both


REQUESTS = st.fixed_dictionaries(
    {
        "common": st.sampled_from((0, 4, 9, 14)),
        "own": st.lists(st.integers(3, 9), min_size=1, max_size=10),
        "new": st.integers(1, 24),
        "kind": st.sampled_from(("greedy", *KINDS)),
        "priority": st.integers(0, 1),
        "tenant": st.sampled_from(("", "a", "b")),
        "salt": st.sampled_from((None, None, "s")),
        "ends": st.booleans(),
    }
)


class Asked:
    """What is known of one request."""

    def __init__(self, prompt, new, kind, **settings):
        self.prompt, self.new, self.kind, self.settings = prompt, new, kind, settings
        self.outputs = []
        self.aborted = False

    @property
    def seats(self):
        named = KINDS[self.kind]
        return max(named.get("n", 1), named.get("best_of", 1), named.get("num_beams", 1))

    @property
    def work(self):
        """The most tokens that it computes where nobody is in its way."""
        return self.seats * (len(self.prompt) + self.new)


class Batching(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(MODELS)),
        block_size=st.sampled_from((1, 2, 4)),
        num_tokens=st.integers(24, 64),
        seats=st.sampled_from((8, 5, 2, 1)),
        more_budget=st.sampled_from((20, 60, 3, 0)),
        policy=st.sampled_from(("fcfs", "priority")),
        preemption=st.sampled_from(("least_computed", "last_come")),
        watermark=st.sampled_from((0.0, 0.01, 0.3)),
        shares=st.booleans(),
        swaps=st.sampled_from((0, 500, 10**5)),
    )
    def begin(self, name, block_size, num_tokens, seats, more_budget, policy, preemption, watermark, shares, swaps):
        num_blocks = num_tokens // block_size * MODELS[name]
        self.batcher = StubBatcher(
            name, block_size=block_size, num_blocks=num_blocks, max_num_seqs=seats,
            max_num_batched_tokens=seats + more_budget, policy=policy, preemption=preemption, watermark=watermark,
            prefix_sharing=shares, swap_space=swaps if shares else 0,
        )  # fmt: skip
        self.by_priority = policy == "priority"
        self.asked, self.waiting, self.foreign, self.final_outputs = {}, {}, [], Counter()
        self.preemptions, self.out_of_order = 0, []
        self.batcher.hooks.append(self.see)

    def see(self, event):
        self.preemptions += type(event) is ev.Preempted
        if type(event) is ev.Admitted and not event.again:
            try:
                self.check_order(event.request_id)
            except AssertionError as error:  # what a hook raises goes to the log
                self.out_of_order.append(error)

    def check_order(self, request_id):
        """First come, first served, among those of one priority and tenant, but for who waits for another's prefix."""
        mine = self.waiting.pop(request_id)
        for group in self.batcher.scheduler.waiting:
            if group.was_preempted and group.waited_for is None:  # at the front until it runs again
                assert self.batcher.scheduler.waiting.priority(group) > mine[1].settings["priority"]
        for other_id, (group, asked) in self.waiting.items():
            same = all(asked.settings[name] == mine[1].settings[name] for name in ("tenant", "priority"))
            if other_id not in self.batcher.finals and same and group.waited_for is None:
                assert group.request.number > mine[0].request.number, f"{request_id} before {other_id}"

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def add(self, requests):
        for request in requests:
            self.add_one(**request)

    def add_one(self, common, own, new, kind, priority, tenant, salt, ends):
        prompt = [10 + number for number in range(common)] + own
        asked = Asked(prompt, new, kind, priority=priority if self.by_priority else 0, tenant=tenant)
        asked.ends = ENDS if ends else ()
        if asked.seats > self.batcher.scheduler.limits.max_num_seqs:
            return
        try:
            name = self.batcher.add_request(
                prompt, max_new_tokens=new, priority=priority, tenant=tenant, salt=salt,
                eos_token_id=list(asked.ends) or None, listener=asked.outputs.append, **KINDS[kind],
            )  # fmt: skip
        except RequestTooLongError:
            return
        self.asked[name] = asked
        self.waiting[name] = (self.batcher.loop._requests[name].groups[0], asked)

    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from([*self.asked, "nobody"]))
        is_there = name in self.asked and name not in self.batcher.finals
        assert self.batcher.abort(name) == is_there
        if is_there:
            self.asked[name].aborted = True
            self.waiting.pop(name, None)

    @rule(count=st.integers(1, 10))
    def step(self, count):
        for _ in range(count):
            self.step_once()

    @rule(share=st.floats(0.05, 1.0))
    def another_takes_blocks(self, share):
        pool = self.batcher.pool
        with pool.changing() as manager:
            count = int(pool.blocks.num_free * share) // len(pool.groups) * pool.block_size
            if count:
                holder = manager.create()
                manager.grow([(holder, count)])
                self.foreign.append(holder)

    @precondition(lambda self: self.foreign)
    @rule()
    def another_gives_blocks_back(self):
        with self.batcher.pool.changing() as manager:
            manager.free(self.foreign.pop())

    @precondition(lambda self: self.asked)
    @rule()
    def run_to_the_end(self):
        """With the pool for itself it takes a bounded number of steps: nobody starves, nobody is kept from his end."""
        while self.foreign:
            self.another_gives_blocks_back()
        left = [asked for name, asked in self.asked.items() if name not in self.batcher.finals]
        bound = 2 + 2 * sum(asked.work for asked in left)
        steps = 0
        while self.batcher.has_work:
            self.step_once()
            steps += 1
            assert steps <= bound, f"{steps} steps for {len(left)} requests with {bound} tokens"
        self.batcher.check_empty()

    def step_once(self):
        batcher, limits = self.batcher, self.batcher.scheduler.limits
        had_work = batcher.has_work
        ends, preemptions, forwards = len(batcher.finals), self.preemptions, len(batcher.forwards)
        had_ended = bool(batcher._parts.engine._moved)
        before = {name: asked.outputs[-1] for name, asked in self.asked.items() if asked.outputs}
        outputs = batcher.step()
        assert not self.out_of_order
        made = batcher.forwards[forwards:]
        assert len(made) <= 1
        for sequences, tokens in made:
            assert sequences <= limits.max_num_seqs
            assert 0 < tokens <= limits.max_num_batched_tokens
        if had_work:
            moved = made or had_ended or len(batcher.finals) > ends or self.preemptions > preemptions
            assert moved, "a step without progress"
        for output in outputs:
            self.final_outputs[output.request_id] += output.finished
            self.check_output(output, before.get(output.request_id))

    def check_output(self, output, before):
        asked = self.asked[output.request_id]
        if KINDS[asked.kind].get("num_beams", 1) == 1 and before is not None and not output.finished:
            for old, new in zip(before.sequences, output.sequences, strict=False):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        if output.finished:
            self.check_end(asked, output)

    def check_end(self, asked, output):
        if output.finish_reason == "error":
            assert isinstance(output.error, OutOfBlocksError)
            assert self.foreign, "a request that fits an empty pool has failed"
        elif output.finish_reason == "abort":
            assert asked.aborted
        else:
            expected = going_on(asked.prompt, asked.new, asked.ends)
            assert output.token_ids == expected
            if "beams" not in asked.kind:
                assert [seq.token_ids for seq in output.sequences] == [expected] * KINDS[asked.kind].get("n", 1)
            if asked.kind == "scored":
                assert None not in output.prompt_logprobs[1:]
        assert output.metrics.peak_blocks <= self.batcher.pool.num_blocks

    @invariant()
    def all_is_whole(self):
        if not hasattr(self, "batcher"):
            return
        batcher, scheduler = self.batcher, self.batcher.scheduler
        batcher.pool.check_integrity()
        assert sum(group.seats for group in scheduler.running) <= scheduler.limits.max_num_seqs
        assert scheduler.running == sorted(scheduler.running, key=scheduler.waiting.rank)
        held = {seq.blocks for group in scheduler.running for seq in group.sequences if seq.blocks is not None}
        assert batcher.pool.manager._sequences == held | set(self.foreign), "blocks of nobody"
        for group in scheduler.waiting:
            assert all(seq.blocks is None for seq in group.sequences)
        for name in self.asked:
            assert len(batcher.finals.get(name, ())) <= 1
            assert self.final_outputs[name] <= 1

    def teardown(self):
        if hasattr(self, "batcher"):
            self.run_to_the_end()
            for name in self.asked:
                assert len(self.batcher.finals[name]) == 1
                assert self.final_outputs[name] == 1
            self.batcher.close()


TestBatching = Batching.TestCase
TestBatching.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
