"""Rows *-ppl-*: perplexity with our quantized cache against that with transformers' at the same bits.

Texts are fed token by token (teacher forced) to a native cache, to ours and to theirs at once, as `hfpaged quality`
does. Both sides quantize a prompt as soon as it is stored. Of the tokens behind it transformers keeps up to 127 as the
model computes them, then quantizes all it holds again; ours keeps at most 15, and none in formats of 8 bits. What they
give with a residual of one block is told beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hfpaged.bench.result import Measured
from hfpaged.bench.rivals import HQQ_4, HQQ_8, QUANTO_4, Rival, not_measured, obstacle
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.config import DEFAULT_BLOCK_SIZE
from hfpaged.quality.contexts import Context
from hfpaged.quality.corpus import load_corpus
from hfpaged.quality.lockstep import compare
from hfpaged.quality.metrics import Summary, TokenScores, summarize
from hfpaged.quality.sides import Side


@dataclass(frozen=True)
class Fed(Context):
    """A context that says itself how many of its tokens are fed one by one."""

    last: int = 1

    @property
    def fed(self) -> int:
        return self.last


def measure(kv_dtype: str, rival: Rival, setting: Setting, shape: Shape) -> Measured:
    """The value is how far our perplexity lies above theirs, a part of 1. Theirs is the lower one of the axis that its
    guide advises and the default.
    """
    if setting.tokenizer is None:
        return not_measured("perplexity needs texts, and the model has no tokenizer")
    reason = obstacle(rival, setting, shape)
    if reason is not None:
        return not_measured(reason)
    as_users_have_it = list(dict.fromkeys((rival, rival.on_default_axis)))
    sides: Sequence[Side | Rival] = (
        Side(kv_dtype, kv_dtype),
        *as_users_have_it,
        rival.with_residual(DEFAULT_BLOCK_SIZE),
    )
    ours, *theirs = compare(setting.model, [_texts(setting, shape)], _context(shape), sides, tick=_nothing)
    best = min(theirs[: len(as_users_have_it)], key=lambda scores: float(scores.nll.mean()))
    against = summarize(ours._replace(nll_native=best.nll))
    return Measured(
        value=against.ppl_change,
        plain=against.perplexity_native,
        paged=against.perplexity,
        unit="ppl",
        note=f"{_error(against)}; against native: {_told(sides, (ours, *theirs))}",
    )


def _texts(setting: Setting, shape: Shape) -> Tensor:
    """[batch, prompt + new + 1] of the texts that `hfpaged quality` has."""
    assert setting.tokenizer is not None
    return load_corpus(None, setting.tokenizer).texts(_context(shape), shape.batch).to(setting.device)


def _context(shape: Shape) -> Fed:
    return Fed("bench", shape.prompt + shape.new, last=shape.new)


def _error(against: Summary) -> str:
    """How far the difference can be trusted: some hundred tokens often cannot tell two good caches apart; KL can."""
    error = f"standard error {100 * against.ppl_error:.2f} %"
    return f"{error}, no clear difference" if abs(against.ppl_change) < 2 * against.ppl_error else error


def _told(sides: Sequence[Side | Rival], scores: Sequence[TokenScores]) -> str:
    """The change of each side against the native cache, as in "int8 +0.02 % (KL 0.0001)"."""
    found = zip(sides, map(summarize, scores), strict=True)
    return ", ".join(f"{side.name} {_change(summary)}" for side, summary in found)


def _change(summary: Summary) -> str:
    return f"{100 * summary.ppl_change:+.2f} % (KL {summary.kl_mean:.2g})"


def _nothing() -> None:
    pass


int8_hqq = partial(measure, "int8", HQQ_8)
int4_hqq = partial(measure, "int4", HQQ_4)
int4_quanto = partial(measure, "int4", QUANTO_4)
