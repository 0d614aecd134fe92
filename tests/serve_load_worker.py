"""A process with a server of a tiny model and a small pool. On SIGTERM it stops, and tells what is left as JSON.

python serve_load_worker.py PORT
"""

from __future__ import annotations

import copy
import json
import sys

import tiny_models
import tiny_tokenizers
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpaged import ContinuousBatcher
from hfpaged.serve import ServeOptions, build_app
from hfpaged.serve.listening import bound
from hfpaged.serve.logs import logging_to_stderr
from hfpaged.serve.uvicorn_server import Config, Server

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob", "eve": "key-of-eve"}
LENGTH = 512  # the model's most tokens, prompt included
SIZES = {
    "num_blocks": 40, "max_num_seqs": 12, "max_num_queued_requests": 6, "max_num_batched_tokens": 128,
    "max_model_len": LENGTH,
}  # fmt: skip
MOST_BODY = 32 * 1024
TEMPLATE = (
    "{% for message in messages %}<|name|>{{ message['role'] }} {{ message['content'] }}<|end|>{% endfor %}<|name|>"
)


def make_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same weights in each process."""
    tokenizer = copy.deepcopy(tiny_tokenizers.byte_level())  # which others in this process have too
    tokenizer.chat_template = TEMPLATE
    model = tiny_models.make("llama", vocab_size=len(tokenizer), max_position_embeddings=LENGTH)
    return model.eval(), tokenizer


def main() -> None:
    torch.set_num_threads(1)
    options = ServeOptions(api_keys=KEYS, send_timeout=2.0, request_timeout=30.0, max_body_bytes=MOST_BODY)
    # Whatever the level, no log shall hold a prompt.
    with logging_to_stderr("debug", as_json=False), ContinuousBatcher(*make_model(), **SIZES) as batcher:
        app = build_app(batcher, options)
        config = Config(app, app.state.service, log_config=None)
        with bound("127.0.0.1", int(sys.argv[1])) as listening:
            Server(config, app.state.service, lambda: None).run(sockets=[listening])
        print(json.dumps(_left(batcher)), flush=True)


def _left(batcher: ContinuousBatcher) -> dict[str, object]:
    batcher.pool.check_integrity()
    return {
        "requests": len(batcher.loop.requests), "with_blocks": len(batcher.requests_with_blocks()),
        "blocks": batcher.pool.num_blocks - batcher.pool.num_free,
    }  # fmt: skip


if __name__ == "__main__":
    main()
