"""Prefixes that are not found, and why."""

from __future__ import annotations

from collections.abc import Callable

from hfpaged.config import format_bytes
from hfpaged.doctor.derived import block_size, blocks, capacity, hit_rate, prefill_share
from hfpaged.doctor.findings import Finding, Severity
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import number, percent, plural

# Prompts that share a system prompt or go on with a chat are found for half of their tokens and more, others for
# hardly a tenth: below this there is no sharing to speak of.
LOW_RATE = 0.3
# Fewer lookups or tokens say nothing, and where prompts are less of the work there is nothing to gain.
FEW_LOOKUPS, FEW_TOKENS, SOME_PREFILL = 10, 500, 0.3
# Lookups that ended at an evicted block, as a part of all: one in ten prompts computes again what was there.
EVICTED = 0.1
# A pool that must grow more than so many times is no remedy.
LARGEST_FACTOR = 4.0


def low_hit_rate(reading: Reading) -> Finding | None:
    """Most prompt tokens are computed, and what most lookups ended for."""
    queried = reading.total("hfpaged_prefix_queried_tokens_total")
    hits = reading.total("hfpaged_prefix_hit_tokens_total")
    reasons = reading.by("hfpaged_prefix_lookups_total", "reason")
    lookups = sum(reasons.values())
    if lookups < FEW_LOOKUPS or (queried < FEW_TOKENS and "declined" not in reasons):
        return None
    culprit = main_culprit(reading)
    if hit_rate(reading) >= LOW_RATE or prefill_share(reading) < SOME_PREFILL or culprit is None:
        return None
    evidence = (
        f"{number(hits)} of {number(queried)} prompt tokens were found ({percent(hit_rate(reading))}), and "
        f"{percent(prefill_share(reading))} of all computed tokens are of prompts; "
        f"{number(reasons[culprit])} of {plural(lookups, 'lookup')} ended {WHY.get(culprit, f'by {culprit}')}, "
        f"on average {number(hits / lookups)} of {number(queried / lookups)} tokens in"
    )
    severity: Severity = "problem" if culprit in FAULTS else "advice"
    remedy = REMEDIES.get(culprit, _unknown)(reading)
    return Finding(
        severity, f"Few prompt tokens are found in the prefix cache: {TITLES.get(culprit, culprit)}", evidence, remedy
    )


def main_culprit(reading: Reading) -> str | None:
    """The most frequent reason that a lookup ended before its prompt did."""
    reasons = reading.by("hfpaged_prefix_lookups_total", "reason")
    misses = {reason: count for reason, count in reasons.items() if reason != "complete" and count}
    return max(misses, key=lambda reason: misses[reason], default=None)


def evicted_prefixes(reading: Reading) -> Finding | None:
    """What would be found had to make room."""
    reasons = reading.by("hfpaged_prefix_lookups_total", "reason")
    evicted, lookups = reasons.get("evicted", 0.0), sum(reasons.values())
    if lookups < FEW_LOOKUPS or evicted / lookups < EVICTED:
        return None
    if main_culprit(reading) == "evicted" and low_hit_rate(reading) is not None:
        return None  # it says the same
    gone = reading.total("hfpaged_kv_evicted_blocks_total")
    evidence = (
        f"{number(evicted)} of {plural(lookups, 'lookup')} ({percent(evicted / lookups)}) came to a block that had "
        f"been evicted; {number(gone)} blocks had to make room in a pool of {number(blocks(reading))}; the hit rate is "
        f"{percent(hit_rate(reading))}"
    )
    return Finding("problem", "Prefixes are evicted before they are wanted again", evidence, _larger(reading))


def _larger(reading: Reading) -> str:
    pool, total = capacity(reading), blocks(reading)
    factor = 1 + reading.total("hfpaged_kv_evicted_blocks_total") / total if total else LARGEST_FACTOR
    often = "pin what many share (pool.pin_prefix)"
    if not reading.get("hfpaged_kv_swap_space_blocks"):  # there is no such metric where there is no such space
        often = f"let them go to host memory and come back from there (swap_space=, --swap-space); or {often}"
    if factor > LARGEST_FACTOR:
        return f"{often}; kv_dtype='int8' keeps twice as many tokens in {format_bytes(pool)}, a larger pool still more"
    return (
        f"a pool of {format_bytes(pool)} -> {format_bytes(pool * factor)} (memory=) would have kept all of them; or "
        f"kv_dtype='int8', which keeps twice as many tokens; or {often}"
    )


def _differs(reading: Reading) -> str:
    return (
        "move what differs from prompt to prompt (time, UUID, user name, retrieved text) behind what they share; "
        "pool.explain(ids, tokenizer) shows the two texts at the first difference and what moving it would save"
    )


def _never_seen(reading: Reading) -> str:
    return (
        "if the prompts have something in common, something before it differs (an id or a time in the first tokens): "
        "put that last, pool.explain(ids, tokenizer) shows it; if they have not, this is as it must be"
    )


def _below_block_size(reading: Reading) -> str:
    size = block_size(reading)
    if size <= 8:
        return f"with blocks of {size} tokens there is little to gain: such prompts are too short to be worth it"
    return f"block_size={size} -> {max(size // 2, 8)}, as only full blocks are kept"


def _other_key(reading: Reading) -> str:
    return (
        "what they need is known under another salt, adapter or model: use one salt for all that may share, and warm "
        "each adapter up; if tenants must not share, this is as it must be"
    )


def _left_window(reading: Reading) -> str:
    return (
        "layers with a window keep only its end: have chats go on from their whole last answer, or compute the shared "
        "prefix as a prompt of its own and pin it (pool.pin_prefix)"
    )


def _declined(reading: Reading) -> str:
    return (
        "no lookup was made for them: cache.explain_last() says why (prefix_sharing=False, pictures, embeddings as "
        "input, prompts whose log probabilities are wanted)"
    )


def _unknown(reading: Reading) -> str:
    return "pool.explain(ids, tokenizer) of such a prompt says more"


# Reasons that the one who runs it can do away with; the others may be what was wanted.
FAULTS = {"differs", "evicted", "below_block_size"}
REMEDIES: dict[str, Callable[[Reading], str]] = {
    "differs": _differs,
    "evicted": _larger,
    "below_block_size": _below_block_size,
    "other_key": _other_key,
    "never_seen": _never_seen,
    "left_window": _left_window,
    "declined": _declined,
}
TITLES = {
    "differs": "prompts differ early",
    "evicted": "they were evicted",
    "below_block_size": "what they share is shorter than a block",
    "other_key": "they are known under other keys",
    "never_seen": "they begin like none before",
    "left_window": "they have left the windows",
    "declined": "none is looked up",
}
WHY = {
    "differs": "where the prompt differs from the known one",
    "evicted": "at an evicted block",
    "below_block_size": "as what was left fills no block",
    "other_key": "as it is known under another key only",
    "never_seen": "as nothing known goes on like it",
    "left_window": "as the window's tokens are gone",
    "declined": "before it began",
}
