"""The spans of one request, from events whose times are chosen."""

from __future__ import annotations

import contextvars
import types

import pytest
from opentelemetry.trace import StatusCode
from traced import Traced, seconds

from hfpaged.engine import events as ev
from hfpaged.engine.outputs import RequestMetrics
from hfpaged.prefix_block import Origin
from hfpaged.telemetry.batcher_traces import BatcherTraces
from hfpaged.telemetry.spans import Origins

PROMPT = 20


class Told:
    """Tells a hook of one request, with `num_sequences` samples or beams. Times count from its arrival."""

    def __init__(self, *, num_sequences=1, num_beams=1):
        self.traced = Traced()
        self.hook = BatcherTraces(self.traced.tracer, Origins(), "model", "auto")
        config = types.SimpleNamespace(temperature=1.0, top_p=None, top_k=None)
        params = types.SimpleNamespace(
            num_sequences=num_sequences, num_beams=num_beams, n=num_sequences, do_sample=False, config=config,
            max_new_tokens=9, frequency_penalty=0.0, presence_penalty=0.0, stop_strings=(),
        )  # fmt: skip
        context = contextvars.copy_context()
        origin = Origin("it")
        self.tell(ev.Arrived, 0, prompt_tokens=PROMPT, priority=0, params=params, origin=origin, context=context)

    def tell(self, kind, time, **fields):
        self.hook(kind(request_id="it", time=1000.0 + time, **fields))
        return self

    def admitted(self, time, *, since=0, waits=None):
        waits = {"turn": float(time - since)} if waits is None else waits
        return self.tell(ev.Admitted, time, queue_time=sum(waits.values()), again=since > 0, waits=waits)

    def chunk(self, began, ended, start, tokens, number=None):
        number = began if number is None else number
        return self.tell(ev.Prefilled, ended, number=number, began=1000.0 + began, start=start, tokens=tokens)

    def first_token(self, time):
        return self.tell(ev.FirstToken, time, time_to_first_token=time)

    def preempted(self, time, tokens):
        return self.tell(ev.Preempted, time, lost=5, output_tokens=tokens)

    def ended(self, time, kind=ev.Finished, tokens=0, waits=None, **fields):
        """Its one span, and its children as (name, begin, end)."""
        metrics = RequestMetrics(1000.0, 1000.0, waits=waits or {})
        fields |= {"output_tokens": tokens, "prompt_tokens": PROMPT, "sequence_tokens": (tokens,)}
        fields |= {"finish_reason": "length"} if kind is ev.Finished else {}
        self.tell(kind, time, metrics=metrics, **fields)
        assert len(self.hook) == 0
        (span,) = self.traced.requests
        return span, [(child.name, *times(child)) for child in self.traced.children(span)]

    def decoded(self):
        (span,) = self.traced.requests
        return [child.attributes.get("hfpaged.tokens") for child in self.traced.children(span, "decode")]


def times(span):
    return tuple(round(time / 1e9 - 1000, 3) for time in (span.start_time, span.end_time))


def running():
    """Its first token came at 3."""
    return Told().admitted(1).chunk(1, 3, 0, PROMPT).first_token(3)


def test_chunks_of_one_step_are_one_span():
    told = Told(num_beams=3, num_sequences=1).admitted(1).chunk(1, 3, 0, PROMPT).first_token(3).preempted(5, 0)
    told.admitted(6, since=5).chunk(6, 8, 0, 10, number=6).chunk(6, 8.5, 4, 6, number=6).chunk(9, 10, 10, 3)
    span, children = told.ended(12, tokens=6)
    assert children[2:] == [
        ("decode", 3, 5),
        ("queue", 5, 6),
        ("prefill", 6, 8.5),
        ("prefill", 9, 10),
        ("decode", 10, 12),
    ]
    assert told.decoded() == [None, 6]
    prefills = told.traced.children(span, "prefill")
    assert [(chunk.attributes["hfpaged.start_position"], chunk.attributes["hfpaged.tokens"]) for chunk in prefills] == [
        (0, PROMPT), (0, 16), (10, 3),
    ]  # fmt: skip


def test_a_step_that_began_before_the_admission_counts_from_there():
    _, children = Told().admitted(2).chunk(1, 3, 0, PROMPT).first_token(3).ended(5, tokens=2)
    assert children == [("queue", 0, 2), ("prefill", 2, 3), ("decode", 3, 5)]


def test_one_that_fails_in_the_queue_after_a_preemption_does_not_decode_there():
    span, children = running().preempted(5, 2).ended(7, ev.Failed, tokens=2, error=ValueError("no"))
    assert children[2:] == [("decode", 3, 5), ("queue", 5, 7)]
    assert span.status.status_code is StatusCode.ERROR


def test_one_that_fails_while_it_is_computed_again_does_not_decode_there():
    told = running().preempted(5, 2).admitted(6, since=5).chunk(6, 7, 0, 16)
    _, children = told.ended(8, ev.Failed, tokens=2, error=ValueError("no"))
    assert children[2:] == [("decode", 3, 5), ("queue", 5, 6), ("prefill", 6, 7)]


def test_one_that_fails_while_it_decodes_again_has_decoded_as_long_as_it_did():
    told = running().preempted(5, 2).admitted(6, since=5).chunk(6, 7, 0, 16).chunk(7, 8, 16, 6)
    _, children = told.ended(11, ev.Failed, tokens=5, error=ValueError("no"))
    assert children[-1] == ("decode", 8, 11)
    assert told.decoded() == [2, 3]


@pytest.mark.parametrize("kind", [ev.Finished, ev.Aborted])
def test_tokens_are_those_of_each_stay(kind):
    told = running().preempted(5, 2).admitted(6, since=5).chunk(6, 8, 0, PROMPT + 2).preempted(9, 5)
    told.admitted(10, since=9).chunk(10, 11, 8, PROMPT + 5 - 8)
    told.ended(13, kind, tokens=9)
    assert told.decoded() == [2, 3, 4]


def test_one_that_is_preempted_before_it_was_computed_again_decodes_only_later():
    told = running().preempted(5, 2).admitted(6, since=5).chunk(6, 7, 0, 16).preempted(8, 2).admitted(9, since=8)
    _, children = told.chunk(9, 10, 0, PROMPT + 2).ended(12, tokens=4)
    names = [name for name, _, _ in children]
    assert names == ["queue", "prefill", "decode", "queue", "prefill", "queue", "prefill", "decode"]
    assert told.decoded() == [2, 2]


@pytest.mark.parametrize(("kind", "fields"), [(ev.Aborted, {}), (ev.Failed, {"error": ValueError("no")})])
def test_one_that_ends_before_its_last_token_was_decoded_has_not_decoded(kind, fields):
    _, children = Told().admitted(1).chunk(1, 3, 0, PROMPT - 1).ended(4, kind, **fields)
    assert children == [("queue", 0, 1), ("prefill", 1, 3)]


def test_one_whose_prompt_was_not_told_of_as_computed_decodes_all_the_same():
    """Ctrl-C came in the step of its prompt's last token, which the next step decodes."""
    _, children = Told().admitted(1).first_token(3).ended(5, tokens=3)
    assert children == [("queue", 0, 1), ("decode", 1, 5)]
    told = Told().admitted(1).chunk(1, 2, 0, PROMPT - 5).first_token(4)
    told.preempted(5, 2).admitted(6, since=5)
    _, children = told.ended(9, tokens=4)
    assert children == [("queue", 0, 1), ("prefill", 1, 2), ("decode", 2, 5), ("queue", 5, 6), ("decode", 6, 9)]
    assert told.decoded() == [2, 2]


def test_one_that_ends_as_soon_as_it_was_computed_again_has_not_decoded_again():
    told = running().preempted(5, 2).admitted(6, since=5).chunk(6, 8, 0, PROMPT + 2)
    _, children = told.ended(9, ev.Aborted, tokens=2)
    assert children[-1] == ("prefill", 6, 8)


def test_one_that_ends_in_the_queue_waited_there_for_the_rest():
    told = running().preempted(5, 2)
    span, _ = told.ended(8, ev.Aborted, tokens=2, waits={"turn": 1.0, "blocks": 3.0})
    queue = told.traced.children(span, "queue")[-1]
    assert queue.attributes == {"hfpaged.wait.blocks": 3.0, "hfpaged.again": True}


@pytest.mark.parametrize(("first", "second"), [(5, 7), (7, 5)])
def test_samples_that_wait_beside_each_other_are_told_apart_by_how_long(first, second):
    told = Told(num_sequences=3).admitted(1).chunk(1, 3, 0, PROMPT).first_token(3)
    told.preempted(5, 6).preempted(7, 9)
    told.admitted(8, since=first).chunk(8, 9, 0, PROMPT + 2).admitted(10, since=second).chunk(10, 11, 0, PROMPT + 2)
    span, children = told.ended(15, tokens=30)
    stays = sorted([("queue", first, 8), ("queue", second, 10)])
    assert [child for child in children if child[0] == "queue"] == [("queue", 0, 1), *stays]
    assert [child for child in children if child[0] == "decode"] == [("decode", 3, 15)]
    assert told.decoded() == [30]
    assert seconds(span) == 15


def test_two_samples_that_are_still_in_the_queue_leave_it_at_the_end():
    told = Told(num_sequences=2).admitted(1).chunk(1, 3, 0, PROMPT).first_token(3).preempted(5, 4).preempted(6, 4)
    span, children = told.ended(9, ev.Aborted, tokens=4, waits={"turn": 1.0, "blocks": 7.0})
    assert children[-2:] == [("queue", 5, 9), ("queue", 6, 9)]
    assert all(set(stay.attributes) == {"hfpaged.again"} for stay in told.traced.children(span, "queue")[1:])


def test_beams_that_never_got_a_token_have_not_decoded():
    _, children = Told(num_beams=3).admitted(1).chunk(1, 3, 0, PROMPT).ended(4, ev.Aborted)
    assert children == [("queue", 0, 1), ("prefill", 1, 3)]


def test_beams_that_end_in_the_queue_do_not_decode_there():
    told = Told(num_beams=3).admitted(1).chunk(1, 3, 0, PROMPT).first_token(3).preempted(5, 0)
    _, children = told.ended(7, ev.Aborted)
    assert children[2:] == [("decode", 3, 5), ("queue", 5, 7)]
