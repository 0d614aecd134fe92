"""The figures of a watch in words: one line while it goes on, one when it is over."""

from __future__ import annotations

from hfpaged.config import format_bytes
from hfpaged.watching.tracker import Figures


def share_of(part: int, total: int) -> str:
    return f"{part / total:.0%}" if total else "0%"


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 10 or not tokens else f"{tokens:.1f}"


def hits(figures: Figures) -> str:
    return "-" if figures.hit_rate is None else f"{figures.hit_rate:.0%}"


def blocks(figures: Figures) -> str:
    """Free ones are those that nobody holds, cached ones among them."""
    now = figures.now
    if not now.blocks_total:
        return "pool without a size before its first key"
    used = f"{now.blocks_used:,} of {now.blocks_total:,} blocks used"
    return f"{used}, {now.blocks_free:,} free ({now.blocks_cached:,} cached)"


def live_parts(figures: Figures) -> list[str]:
    """What stands behind the bar, most important first."""
    now = figures.now
    parts = [blocks(figures)]
    if now.running is not None:
        parts.append(f"{now.running} running {now.waiting} waiting")
    parts += [
        f"prefill {rate(figures.prefill_rate)}/s decode {rate(figures.decode_rate)}/s",
        f"hits {hits(figures)}",
    ]
    if now.preemptions is not None:
        parts.append(f"{now.preemptions} preempted")
    return [*parts, format_bytes(now.bytes_used)]


def live_line(figures: Figures) -> str:
    """One line without a bar."""
    now = figures.now
    return f"{figures.name}: {share_of(now.blocks_used, now.blocks_total)} | {' | '.join(live_parts(figures))}"


def last_line(figures: Figures) -> str:
    """Totals since the watch began, to stay when it is over."""
    now, busy = figures.now, figures.busy_seconds
    parts = [] if now.ended is None else [f"{now.ended:,} request{'' if now.ended == 1 else 's'}"]
    tokens = f"{figures.prefill_tokens:,} tokens prefilled, {figures.decode_tokens:,} decoded"
    if busy > 0 and (figures.prefill_tokens or figures.decode_tokens):
        total = figures.prefill_tokens + figures.decode_tokens
        tokens += f" in {busy:.1f} s ({rate(total / busy)}/s, decode {rate(figures.decode_tokens / busy)}/s)"
    parts += [
        tokens,
        f"peak {figures.peak_blocks:,} of {now.blocks_total:,} blocks"
        f" ({share_of(figures.peak_blocks, now.blocks_total)})",
        f"hits {hits(figures)}",
    ]
    if now.preemptions is not None:
        parts.append(f"{now.preemptions} preempted")
    return f"{figures.name}: {', '.join(parts)}; watched for {figures.seconds:.1f} s"
