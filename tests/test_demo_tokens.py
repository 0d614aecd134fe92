"""The demo model writes the same with a PagedCache."""

from __future__ import annotations

import pytest
from transformers import DynamicCache

import hfpaged
from hfpaged import compat

QUESTIONS = [
    "Hi",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours and say for each of them one thing that has it.",
    "Why is the sky blue? Explain it to a child of six years in two short sentences.",
    "2 + 2 =",
    "Translate into German: the house is large.",
    "Tell me a story that begins with: Once upon a time, there was a small fox who could not sleep because the moon "
    "was far too bright, and whose mother had told him that counting sheep helps.",
]


@pytest.mark.demo_model
@pytest.mark.parametrize("beams", [1, 2])
def test_the_demo_model_answers_eight_chats_in_the_same_words(demo, beams):
    model, tokenizer = demo
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    settings = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams}
    name = compat.cache_argument()
    wanted = model.generate(**inputs, **settings, **{name: DynamicCache(config=model.config)})
    cache = hfpaged.PagedCache(model, memory="512MiB")
    try:
        tokens = model.generate(**inputs, **settings, **{name: cache})
    finally:
        hfpaged.unpatch(model)
    assert tokenizer.batch_decode(tokens) == tokenizer.batch_decode(wanted)
    pool = cache.pool
    pool.check_integrity()
    del cache
    assert pool.num_free == pool.num_blocks
