"""Why a prompt was not all known, in a sentence: of an event, which holds a reason and two numbers."""

from __future__ import annotations

from hfpaged.engine.events import PrefixMatched

_SENTENCES = {
    "never seen": "no known prompt goes on like it",
    "below block size": "the {left} behind them fill no block of {size}, and only full blocks are kept",
    "evicted": "more were known until their blocks had to make room; a larger pool keeps them longer",
    "left window": "more are known, but not what layers with a window would need of them",
    "other key": "more are known with another salt, adapter or weights, which is never shared",
    "differs": "it goes on unlike the known prompt that is most like it",
}
# What a tenant is told where the reason is about prompts of others.
NEVER_SEEN = "never seen"


def reason_told(event: PrefixMatched, *, may_know_others: bool) -> str:
    """That something is known under another key is nothing that a tenant may learn."""
    return event.reason if may_know_others or event.reason != "other key" else NEVER_SEEN


def sentence(event: PrefixMatched, reason: str, block_size: int) -> str:
    """With the numbers."""
    why = _SENTENCES.get(reason, reason).format(left=event.queried - event.hit, size=block_size)
    waited = " (after it had waited for another request to compute them)" if event.waited_for else ""
    return f"{event.hit} of {event.queried} prompt tokens were known{waited}: {why}"
