"""What tests of the server's endpoints share: a tiny model whose tokenizer has a chat template."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import tiny_models
import tiny_tokenizers
from transformers import PreTrainedTokenizerFast

from hfpaged import ContinuousBatcher

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ hint or '' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte level, so that a token can be half a character."""
    found = copy.deepcopy(tiny_tokenizers.byte_level())
    found.chat_template = TEMPLATE
    return found


def save(folder: Path) -> Path:
    """The model and its tokenizer, where `hfpaged serve` can load them."""
    tokens = tokenizer()
    tiny_models.make("llama", vocab_size=len(tokens)).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def batcher(**sizes: Any) -> ContinuousBatcher:
    tokens = tokenizer()
    model = tiny_models.make("llama", vocab_size=len(tokens))
    return ContinuousBatcher(model, tokens, **{"num_blocks": 512, "max_num_seqs": 64, **sizes})


def events(response: httpx.Response) -> Iterator[Any]:
    """The data of server-sent events, each parsed; the last one must be [DONE], and is left out."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        yield json.loads(line.removeprefix("data: "))
