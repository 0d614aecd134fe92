"""Internal fragmentation: the slots behind a sequence's last token, and the block size that lengths want."""

from __future__ import annotations

import math

from hfpaged.doctor import derived
from hfpaged.doctor.derived import GOOD_USE, has_enough, use
from hfpaged.doctor.findings import Finding, Severity
from hfpaged.doctor.histogram import Histogram
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import number, percent

SIZES = (8, 16, 32, 64)
# PagedAttention wastes less than 4 % (Kwon et al. 2023, arXiv 2309.06180); for this much a restart is worth it.
WASTEFUL = 0.1
# The largest size that wastes no more is the one to take: tables and lookups are the shorter for it.
ACCEPTED = 0.05


def block_size(reading: Reading) -> Finding | None:
    """A large part of the blocks is unfilled."""
    lengths = reading.histogram("hfpaged_sequence_tokens")
    size = derived.block_size(reading)
    if not has_enough(reading) or not lengths.count:
        return None
    wastes = {each: waste(lengths, each) for each in sorted({*SIZES, size})}
    best = max((each for each in SIZES if wastes[each] <= ACCEPTED), default=SIZES[0])
    if wastes[size] < WASTEFUL or best >= size:
        return None
    listed = ", ".join(f"{percent(wastes[each])} with {each}" for each in wastes)
    now = reading.get("hfpaged_kv_unfilled_ratio")
    evidence = (
        f"of the blocks that {number(lengths.count)} sequences of {number(lengths.mean)} tokens on average had at "
        f"their ends, {percent(wastes[size])} of the slots held no token (simulated from their lengths: {listed})"
        + (f"; {percent(now)} of used blocks now" if now else "")
    )
    severity: Severity = "problem" if use(reading) > GOOD_USE[1] else "advice"
    return Finding(severity, "Blocks are too large for these sequences", evidence, f"block_size={size} -> {best}")


def block_waste(reading: Reading) -> float | None:
    """As a part of the slots that ended sequences had; None where none has ended. Raises Lacks."""
    lengths = reading.histogram("hfpaged_sequence_tokens")
    return waste(lengths, derived.block_size(reading)) if lengths.count else None


def waste(lengths: Histogram, size: int) -> float:
    """Unfilled slots as a part of all slots of the blocks that sequences of such lengths have at their ends, with
    `size` slots in a block. In each bucket all lengths are taken to be equally frequent, beyond the last bound all to
    be of the mean that the sum leaves for them.
    """
    tokens = slots = beyond = 0.0
    for low, high, count in lengths.buckets():
        if math.isinf(high):
            beyond, last = count, low
        elif count:
            tokens += count * (low + 1 + high) / 2
            slots += count * size * _mean_blocks(int(low), int(high), size)
    if beyond:
        length = max((lengths.sum - tokens) / beyond, last + 1)
        tokens += beyond * length
        slots += beyond * (length + (size - 1) / 2)  # of long sequences every rest is equally frequent
    return 1 - tokens / slots if slots else 0.0


def _mean_blocks(low: int, high: int, size: int) -> float:
    """Of ceil(n / size) over the lengths n in low+1 .. high."""
    return (_sum_of_blocks(high, size) - _sum_of_blocks(low, size)) / (high - low)


def _sum_of_blocks(length: int, size: int) -> int:
    """Of ceil(n / size) over n in 1 .. length."""
    full, rest = divmod(length, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)
