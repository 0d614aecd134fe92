"""Whether another server gave the same texts as ours, and how many tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hfpaged.bench.against_form import Form
from hfpaged.bench.batch_workload import Workload
from hfpaged.bench.endpoint import ADVICE
from hfpaged.bench.serve_answers import Answer
from hfpaged.bench.serve_client import Played

CUT = "\ufffd"  # half a character at an end
SHOWN = 12  # characters from where two texts part


@dataclass(frozen=True)
class Verdict:
    """`counts` has the tokens of each answer by turn; `told` says how many texts are equal, and where they part.
    `ended_early` where answers of theirs are shorter than asked for, in a form in which they must not be.
    """

    is_same: bool
    counts: Sequence[Sequence[int]]
    told: str
    ended_early: bool


def judge(
    tokenizer: PreTrainedTokenizerBase, form: Form, turns: Sequence[Workload], theirs: Sequence[Played],
    ours: Sequence[Played],
) -> Verdict:  # fmt: skip
    """All turns of both sides."""
    counts = [_counts(tokenizer, form, *turn) for turn in zip(turns, theirs, strict=True)]
    pairs = [
        (a.rstrip(CUT), b.rstrip(CUT))
        for one, other in zip(theirs, ours, strict=True)
        for a, b in zip(one.texts, other.texts, strict=True)
    ]
    equal = sum(a == b for a, b in pairs)
    told = f"{equal} of {len(pairs)} texts are equal"
    short = form.is_endless and any(
        count < asked
        for turn, made in zip(turns, counts, strict=True)
        for count, asked in zip(made, turn.new, strict=True)
    )
    if equal < len(pairs):
        told = "; ".join([told, *_parting(pairs), ADVICE])
    return Verdict(equal == len(pairs), counts, told, short)


def _counts(tokenizer: PreTrainedTokenizerBase, form: Form, workload: Workload, played: Played) -> list[int]:
    return [_count(tokenizer, form, asked, answer) for asked, answer in zip(workload.new, played.answers, strict=True)]


def _count(tokenizer: PreTrainedTokenizerBase, form: Form, asked: int, answer: Answer) -> int:
    """As the server says; where it does not, what was asked for, or what a text is made of that may have ended."""
    if answer.tokens is not None:
        return answer.tokens
    return asked if form.is_endless else len(tokenizer(answer.text, add_special_tokens=False)["input_ids"])


def _parting(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Where the first text that differs does so."""
    for a, b in pairs:
        if a != b:
            place = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            rest = f"{a[place:][:SHOWN]!r}, {b[place:][:SHOWN]!r}"
            return [f"one parts after {place} of {max(len(a), len(b))} characters: {rest}"]
    return []
