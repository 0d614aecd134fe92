"""What a cache asks of the prefix index, step by step, and what it tells those who ask why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hfpaged.admission import Admission, Declined, declined
from hfpaged.content import read_content
from hfpaged.explain import Decoder
from hfpaged.prefix_report import PrefixReport
from hfpaged.prefix_sharing import are_those_of, begin_batch, root_keys, why_not_shared
from hfpaged.rows import Rows

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache

_FORGETS = "a cache with window=, which forgets: what it stores depends on what it has forgotten"
_OWN_STATE = "layers with a state of their own, recurrent ones say, which does not lie in blocks"
_STORED_PADDING = "a model whose attention looks at padding, which is stored for it"
_NOT_TOLD = "no patched model told this cache its tokens; make it of a model, PagedCache(model), not of a config"


class PrefixLookup:
    """The prefix sharing of one cache: whether it `shares`, and what was found when its batch began.

    `has_state`: whether layers hold more than keys and values. `counts`: whether lookups count as queries of the pool.
    """

    def __init__(self, shares: bool, has_state: bool, *, counts: bool = True) -> None:
        self.shares, self._has_state, self._counts = shares, has_state, counts
        self.may_have_changed = False  # whether the weights may be others than those of the stored keys
        self._admission: Admission | Declined | None = None

    def beside(self, shares: bool) -> PrefixLookup:
        """For a cache that computes a part of a prompt for this one."""
        return PrefixLookup(self.shares and shares, self._has_state, counts=False)

    def fork(self) -> PrefixLookup:
        """For a copy of the cache."""
        child = PrefixLookup(self.shares, self._has_state)
        child._admission = self._admission
        return child

    def begin_step(
        self, cache: PagedCache, rows: Rows, model: PreTrainedModel, inputs: Mapping[str, Any], may_share: bool
    ) -> dict[str, Any] | None:
        """Let empty rows begin with what is known of their prompts, and note what tokens the step brings. Returns the
        arguments of what is left to be computed, None where that is everything.
        """
        if not self.shares:
            return None
        tokens = rows.tokens
        content = None if self._has_state or not may_share else read_content(inputs)
        if self._has_state:
            reason: str | None = _OWN_STATE
        else:
            reason = why_not_shared(model, inputs, content) if may_share else _STORED_PADDING
        left = None
        if not rows.length:
            tokens.root = None
            self._admission = declined(reason, inputs) if reason else None
        if content is None or (tokens.root is None and rows.length) or reason:
            content = None
        elif not rows.length:
            rows.free()  # rows without a token bind nobody to their number
            left, self._admission = begin_batch(cache, rows, model, inputs, content)
            content = read_content(left) if left else content
            self._count_once(rows)
        elif tokens.root and (self.may_have_changed or tokens.is_due_after(content.shape[1])):
            content = content if are_those_of(root_keys(model, cache.salt), tokens.root) else None
        self.may_have_changed = False
        tokens.announce(content)
        return left

    def decline_forgetting(self, rows: Rows, inputs: Mapping[str, Any]) -> None:
        """In a cache with a window a batch begins with nothing known, and is known to nobody."""
        if not rows.length:
            self._admission = declined(_FORGETS, inputs)

    def explain(self, rows: Rows, tokenizer: Decoder | None) -> list[PrefixReport]:
        """For each row of the last batch how much of its prompt was known when it came, and why no more."""
        if self._admission is None and rows.batch:
            row = PrefixReport(rows.length, 0, 0, "declined", rows.pool.block_size, declined=_NOT_TOLD)
            return [row] * rows.batch
        return [] if self._admission is None else self._admission.explain(rows.pool, tokenizer)

    @property
    def last(self) -> Admission | Declined | None:
        """What was found when the last batch began."""
        return self._admission

    def _count_once(self, rows: Rows) -> None:
        if isinstance(self._admission, Admission) and self._counts:
            counts = rows.pool.prefixes.index.counts
            with rows.pool.changing():
                counts.queries += sum(len(items) // self._admission.root.width for items in self._admission.items)
                counts.hits += sum(self._admission.hits)
