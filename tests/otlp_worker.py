"""A program that runs a tiny model under what the OTEL_* variables say, as the command line does. Prints its tokens and
what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from opentelemetry import trace
from test_batcher_tokens import alone, batcher_of, prompts, tiny_models

from hfpaged import PagedCache
from hfpaged.telemetry import providers

SIZES = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 16}


def queued():
    """Spans that wait for the receiver."""
    processors = trace.get_tracer_provider()._active_span_processor._span_processors
    return max(len(processor._batch_processor._queue) for processor in processors)


def main(rounds, seconds):
    """So many rounds, and at least so many seconds."""
    torch.set_num_threads(1)
    tokens, most, ends = [], 0, time.monotonic() + seconds
    with providers.observed():
        batcher = batcher_of("llama", **SIZES)
        while len(tokens) < rounds or time.monotonic() < ends:
            outputs = batcher.generate(prompts(), max_new_tokens=12, do_sample=False)
            tokens.append([output.token_ids for output in outputs])
            most = max(most, queued())
        model = tiny_models.shared("llama")
        tokens.append([alone(model, prompt, past_key_values=PagedCache(model)) for prompt in prompts()[:1]])
        print(json.dumps({"tokens": tokens, "queued": most}), flush=True)
        left = time.monotonic()
    print(json.dumps({"flushed": time.monotonic() - left, "left": time.time()}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
