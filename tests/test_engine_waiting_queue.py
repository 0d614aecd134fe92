"""Who is next, and at what cost: long queues, and as many tenants as users."""

from __future__ import annotations

from array import array

from test_batcher_tokens import batcher_of, checked, prompts

from hfpaged.engine.request import Request, SequenceGroup, SequenceState
from hfpaged.engine.waiting_queue import WaitingQueue


class NoParams:
    prompt_logprobs = None


def group_of(number, tenant="", priority=0):
    request = Request(f"r{number}", number, array("q", [1, 2]), NoParams(), tenant=tenant, priority=priority)
    group = SequenceGroup(request, [SequenceState(request, 0, request.prompt[:])])
    request.groups = [group]
    return group


def numbers(queue):
    return [group.request.number for group in queue.in_order()]


def test_order_is_by_priority_then_preempted_then_share_then_arrival():
    queue = WaitingQueue(by_priority=True)
    groups = [group_of(0, "a"), group_of(1, "b"), group_of(2, "a", priority=-1), group_of(3, "b"), group_of(4, "a")]
    groups[4].was_preempted = True
    for group in groups:
        queue.add(group)
    queue.charge("a", 10)
    assert numbers(queue) == [2, 4, 1, 3, 0]
    assert len(queue) == len(list(queue)) == 5


def test_groups_may_be_admitted_while_the_queue_is_read():
    queue = WaitingQueue()
    for number in range(6):
        queue.add(group_of(number, "ab"[number % 2]))
    seen = []
    for group in queue.in_order():
        seen.append(group.request.number)
        queue.admit(group)
    assert seen == list(range(6))
    assert len(queue) == 0
    assert numbers(queue) == []


def test_only_a_group_that_waits_can_be_taken_out():
    queue = WaitingQueue()
    groups = [group_of(number) for number in range(5)]
    for group in groups[:4]:
        queue.add(group)
    assert not queue.discard(groups[4])
    assert queue.discard(groups[2])
    assert not queue.discard(groups[2])
    assert numbers(queue) == [0, 1, 3]


def test_a_tenant_who_comes_late_has_no_claim_to_what_he_did_not_ask_for():
    queue = WaitingQueue()
    first, late = group_of(0, "early"), group_of(1, "late")
    queue.add(first)
    queue.admit(first)
    queue.charge("early", 1000)
    queue.add(late)
    queue.add(group_of(2, "early"))
    queue.charge("late", 1)
    assert numbers(queue) == [2, 1]


def test_tenants_who_are_gone_are_forgotten():
    queue = WaitingQueue()
    for number in range(100):
        group = group_of(number, f"tenant {number}")
        queue.add(group)
        queue.admit(group)
        queue.charge(group.request.tenant, 5)
        queue.left(group)
    queue.add(group_of(100, "another"))
    assert list(queue._served) == ["another"]
    assert not queue._num_running


def test_not_all_of_a_long_queue_is_asked_for_its_prefix_at_each_step():
    batcher = batcher_of("llama", block_size=4, num_blocks=300, max_num_batched_tokens=16, max_num_seqs=4)
    (common,) = prompts((60,))
    for number in range(100):
        batcher.add_request([*common, 5 + number % 50], max_new_tokens=1, do_sample=False)
    admitter, asked = batcher._parts.scheduler._admitter, []
    plain = admitter.match
    admitter.match = lambda group: asked.append(group) or plain(group)
    batcher.step()
    batcher.step()
    assert 0 < len(asked) < 20
    finals = []
    while batcher.has_work:
        finals += [output for output in batcher.step() if output.finished]
    assert len(finals) == 100
    assert {output.num_cached_tokens for output in finals} == {0, 60}
    checked(batcher)
