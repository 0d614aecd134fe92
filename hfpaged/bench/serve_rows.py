"""The rows of `hfpaged bench serve`. Free of torch, so that help and errors are quick.

No token ends an answer: each request has its own length, the same on all sides.
"""

from __future__ import annotations

from hfpaged.bench.catalog import Row
from hfpaged.bench.shape import Shape
from hfpaged.bench.target import Target

RATE = 2.0  # requests per second of a load, more than the demo model's rivals and about what it takes on two cores
STREAMS = Shape(32, 512, 128)
LOAD = Shape(64, 512, 128)
REQUESTS = "{batch} requests that come at random, prompts to {prompt}, answers to {new}"

SERVE_ROWS = (
    Row(
        "http", "cost of HTTP and JSON: {batch} streams of {new} tokens, over the batcher in process",
        "serve_http:cost", STREAMS, Target(below=0.05, is_share=True),
    ),
    Row("loop", "longest block of the event loop meanwhile", "serve_http:longest_block", STREAMS,
        Target(most=50, unit=" ms")),
    Row("load", f"tokens/s: {REQUESTS}, over transformers serve", "serve_load:throughput", LOAD, Target(1.5),
        takes_server=True),
    Row("first-token", "99th percentile of the time to the first token of that load", "serve_load:first_token", LOAD,
        Target(most=0.5), takes_server=True),
    Row("between", "99th percentile of the time between tokens of that load", "serve_load:between", LOAD, None,
        wants_less=True, takes_server=True),
)  # fmt: skip
