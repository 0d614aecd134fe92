"""Whether attention runs through our kernels."""

from __future__ import annotations

from hfpaged.doctor.derived import num_steps
from hfpaged.doctor.findings import Finding, Severity
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import number, percent


def dense_fallbacks(reading: Reading) -> Finding | None:
    """Keys and values were gathered into dense tensors. The metric begins with the first time."""
    if reading.get("hfpaged_dense_fallbacks_total") is None:
        return None
    reasons = reading.by("hfpaged_dense_fallbacks_total", "reason")
    total = sum(reasons.values())
    if not total:
        return None
    steps = num_steps(reading)
    main = max(reasons, key=lambda reason: reasons[reason])
    evidence = (
        f"{number(total)} attention calls gathered keys and values from their blocks, which copies them each time"
        + (f", in {number(steps)} steps" if steps else "")
        + f"; {percent(reasons[main] / total)} of them for: {main.replace('_', ' ')}"
    )
    remedy = (
        "`hfpaged support MODEL` says what of a model takes this way and why; output_attentions, gradients and masks "
        "of one's own do for any model. Tokens are the same, only slower"
    )
    severity: Severity = "problem" if steps and total >= steps else "advice"
    return Finding(severity, "Attention takes the dense path, not the kernels", evidence, remedy)
