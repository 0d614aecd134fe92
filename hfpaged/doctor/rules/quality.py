"""What the KV format costs in quality, where a sample of the traffic is computed once more with the native cache."""

from __future__ import annotations

from hfpaged.doctor.findings import Finding
from hfpaged.doctor.reading import Reading
from hfpaged.doctor.words import number, plural
from hfpaged.quality.thresholds import Thresholds

# The standard error of 93 % is 0.8 points then.
ENOUGH_TOKENS = 1000
REQUESTS, TOKENS = "hfpaged_shadow_requests_total", "hfpaged_shadow_tokens_total"
AGREED, KL = "hfpaged_shadow_top1_agreed_tokens_total", "hfpaged_shadow_kl"
DROPPED = "hfpaged_shadow_dropped_total"


def kv_format_costs(reading: Reading) -> Finding | None:
    """The likeliest token is another one too often, or distributions are too far apart: by the thresholds of `hfpaged
    quality`. The metrics are there where shadow decoding is on.
    """
    names = dict.fromkeys(each.labels.get("kv_format", "") for each in reading.samples.get(TOKENS, ()))
    return next((finding for name in names if (finding := _judged(reading, name)) is not None), None)


def _judged(reading: Reading, name: str) -> Finding | None:
    tokens = reading.total(TOKENS, kv_format=name)
    if tokens < ENOUGH_TOKENS:
        return None
    top1 = reading.total(AGREED, kv_format=name) / tokens
    kl = reading.histogram(KL, kv_format=name).sum / tokens
    limits = Thresholds()
    assert limits.min_top1 is not None
    assert limits.max_kl is not None
    if top1 >= limits.min_top1 and kl <= limits.max_kl:
        return None
    requests = reading.total(REQUESTS, kv_format=name)
    dropped = reading.get(DROPPED, kv_format=name) or 0.0
    evidence = (
        f"{name} costs: top-1 {100 * top1:.1f} % (at least {100 * limits.min_top1:g} %), KL {kl:.2g} (at most "
        f"{limits.max_kl:g}) over {number(tokens)} tokens of {plural(requests, 'request')} of live traffic"
        + (f"; {plural(dropped, 'request')} drawn besides could not be compared" if dropped else "")
    )
    remedy = (
        f"`hfpaged quality MODEL --kv {name.partition(',')[0]} --against int8,fp8_e4m3,k8v4 --layers` compares formats "
        "and says which layers cost most: keep these native (kv_dtype={'default': ..., 'layers': ...}), or take "
        "another format"
    )
    return Finding("problem", "The KV format changes answers", evidence, remedy)
