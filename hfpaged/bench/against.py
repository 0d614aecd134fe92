"""Rows http-*: the same requests to another server and to ours, with HTTP on both sides.

    clients (a process of their own)  ---HTTP--->  the server at --against
                                      ---HTTP--->  hfpaged serve, in this process, over the model that was loaded

The sides take turns, and each turn has prompts of its own, so that no side has seen them before. Greedy texts must be
the same: where one differs there are no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hfpaged.bench.against_form import Form, form_for
from hfpaged.bench.against_texts import judge
from hfpaged.bench.batch_ours import batcher_of
from hfpaged.bench.batch_workload import Workload, mixed_lengths
from hfpaged.bench.endpoint import Endpoint, EndpointError, reach
from hfpaged.bench.random_prompts import random_lengths
from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import not_measured
from hfpaged.bench.serve_client import Played, Send, play
from hfpaged.bench.serve_host import hosting
from hfpaged.bench.serve_http import NO_TOKENIZER, POOL
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.texts import prose_ids
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import in_turn

Figure = Callable[[Played, Sequence[int]], float]  # of the answers, and the number of tokens of each
Prompts = Callable[[Setting, Shape, int], Workload]  # of one turn, by its number


def decode(setting: Setting, shape: Shape) -> Measured:
    """The value is the ratio of the speeds of one stream, from its first token on."""
    return _measured(setting, shape, _single, _decode_speed, "tok/s")


def first_token(setting: Setting, shape: Shape) -> Measured:
    """The value is the wait for the first token of a prompt whose beginning is known, as a part of theirs."""
    return _measured(setting, shape, _warm, lambda played, counts: 1e3 * played.answers[0].first, "ms")


def batch(setting: Setting, shape: Shape) -> Measured:
    """The value is the ratio of the speeds of many requests at once."""
    return _measured(setting, shape, _mixed, _speed, "tok/s")


def batch_alike(setting: Setting, shape: Shape) -> Measured:
    """The same for prompts that begin alike."""
    return _measured(setting, shape, _alike, _speed, "tok/s")


def _measured(
    setting: Setting, shape: Shape, prompts: Prompts, figure: Figure, unit: str, form: Form | None = None
) -> Measured:
    """In `form`, by default the first that the server takes."""
    endpoint = setting.against
    assert endpoint is not None, "rows that need a server are not chosen without one"
    if setting.tokenizer is None:
        return not_measured(NO_TOKENIZER)
    turns = [prompts(setting, shape, number) for number in range(setting.repeats + 1)]
    form = form or form_for(endpoint, setting.tokenizer, turns[0].prompts[0])
    theirs, ours = _play_turns(setting, endpoint, form, turns)
    verdict = judge(setting.tokenizer, form, turns[1:], theirs, ours)
    if verdict.ended_early:  # it was told not to, and does not know how: both sides may end then, with prompts anew
        again = replace(setting, against=replace(endpoint, salt=f"{endpoint.salt}a"))
        return _measured(again, shape, prompts, figure, unit, form.that_may_end())
    try:
        plain, paged = (
            [figure(played, counts) for played, counts in zip(side, verdict.counts, strict=True)]
            for side in (theirs, ours)
        )
    except EndpointError as error:
        found = replace(not_measured(str(error)), same_tokens=verdict.is_same)
        return replace(found, difference=verdict.told, rival=endpoint.url)
    note = f"HTTP on both sides, {form.name}; {verdict.told}; theirs is {endpoint.model} at {endpoint.url}"
    found = in_pairs(plain, paged, unit, verdict.is_same, note)
    return replace(found, difference=verdict.told, rival=endpoint.url)


def _play_turns(
    setting: Setting, endpoint: Endpoint, form: Form, turns: Sequence[Workload]
) -> tuple[list[Played], list[Played]]:
    """What both sides answered; the first turn is there to warm up, and counts for nothing."""
    found: tuple[list[Played], list[Played]] = ([], [])
    with batcher_of(setting, POOL, tokenizer=setting.tokenizer) as batcher, hosting(batcher) as (url, _):
        pairs = list(zip(found, (endpoint, reach(url)), strict=True))
        for number, workload in enumerate(turns):
            for played, side in in_turn(number, pairs):
                played.append(_play(setting, side, form, workload))
    return found[0][1:], found[1][1:]


def _play(setting: Setting, endpoint: Endpoint, form: Form, workload: Workload) -> Played:
    assert setting.tokenizer is not None
    sends = [
        Send(0.0, form.body(endpoint.model, setting.tokenizer, prompt, new))
        for prompt, new in zip(workload.prompts, workload.new, strict=True)
    ]
    return play(form.url(endpoint), sends, endpoint.headers)


def _single(setting: Setting, shape: Shape, number: int) -> Workload:
    return Workload([_prose(setting, shape.prompt, number)], [shape.new])


def _warm(setting: Setting, shape: Shape, number: int) -> Workload:
    """All turns begin alike: the first one, which does not count, is the one that computes what they have in common."""
    common = _prose(setting, shape.prompt)
    return Workload([common + prose_ids(setting.tokenizer, str(number), number, shape.own)], [shape.new])


def _mixed(setting: Setting, shape: Shape, number: int) -> Workload:
    lengths, new = mixed_lengths(shape)
    return Workload([_prose(setting, length, index, number) for index, length in enumerate(lengths)], new)


def _alike(setting: Setting, shape: Shape, number: int) -> Workload:
    common = _prose(setting, shape.prompt, number)
    own = random_lengths(shape.batch, max(shape.own // 2, 1), max(shape.own, 1))
    prompts = [common + prose_ids(setting.tokenizer, str(index), index, length) for index, length in enumerate(own)]
    return Workload(prompts, [shape.new] * shape.batch)


def _prose(setting: Setting, length: int, *numbers: int) -> list[int]:
    """Tokens that begin with these numbers and what is this run's own, so that no server has them in its cache."""
    assert setting.against is not None
    return prose_ids(setting.tokenizer, ".".join(map(str, (*numbers, setting.against.salt))), sum(numbers), length)


def _speed(played: Played, counts: Sequence[int]) -> float:
    """Generated tokens per second, from the first request to the end of the last answer."""
    return sum(counts) / played.seconds


def _decode_speed(played: Played, counts: Sequence[int]) -> float:
    """Of one stream: its first token ends the prefill, which is not counted."""
    (answer,), (count,) = played.answers, counts
    seconds = answer.parts[-1][0] - answer.parts[0][0]
    if seconds <= 0:
        raise EndpointError(f"an answer of {count} tokens came in one piece; it is not streamed")
    return (count - 1) / seconds
