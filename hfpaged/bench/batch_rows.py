"""The rows of `hfpaged bench batch`. Free of torch, so that help and errors are quick.

No token ends an answer: each request has its own length, the same on all sides.
"""

from __future__ import annotations

from hfpaged.bench.catalog import SHARED, Row
from hfpaged.bench.shape import Shape
from hfpaged.bench.target import Target

MIXED = Shape(32, 512, 256)
REQUESTS = "{batch} requests at once, prompts to {prompt}, answers to {new}"

BATCH_ROWS = (
    Row("static", f"{REQUESTS}, over generate() in batches", "batch_throughput:over_static", MIXED, Target(2.0)),
    Row("generate-batch", f"{REQUESTS}, over generate_batch", "batch_throughput:over_continuous", MIXED, Target(2.0)),
    Row(
        "prefix", "{batch} requests with {prompt} tokens in common, {new} new, over generate_batch",
        "batch_throughput:over_continuous_alike", SHARED, Target(3.0),
    ),
    Row("pool", "pool in use before the first preemption", "batch_pool", MIXED, Target(0.95, is_share=True)),
    Row(
        "overhead", "scheduling and bookkeeping of a step, {batch} sequences", "batch_overhead:share",
        Shape(32, 128, 64, own=16), Target(below=0.03, is_share=True),
    ),
    Row(
        "overhead-256", "the same in milliseconds, {batch} sequences, stub model", "batch_overhead:milliseconds",
        Shape(256, 32, 64, own=16), Target(below=2.0, unit=" ms"),
    ),
    Row(
        "telemetry", f"spans and metrics of a run of {REQUESTS}", "batch_telemetry:with_sdk", MIXED,
        Target(below=0.01, is_share=True),
    ),
    Row(
        "telemetry-no-sdk", "the same where nothing is configured", "batch_telemetry:without_sdk", MIXED,
        Target(below=0.001, is_share=True),
    ),
    Row(
        "gap", "longest gap of a stream while a prompt of {prompt} comes, over its median", "batch_gap",
        Shape(1, 6000, 32, own=64), Target(most=3.0),
    ),
    Row(
        "http-batch", f"tokens/s over HTTP: {REQUESTS}, over --against", "against:batch", MIXED, None,
        needs_server=True,
    ),
    Row(
        "http-prefix", "the same of {batch} requests with {prompt} tokens in common, {new} new", "against:batch_alike",
        SHARED, None, needs_server=True,
    ),
)  # fmt: skip
