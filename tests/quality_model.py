"""A tiny model with a tokenizer of bytes, for the tests of `hfpaged quality`."""

from __future__ import annotations

from tiny_models import PLAIN, with_large_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

POSITIONS = 96


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and nothing before a text."""
    vocab = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def small_llama(**changes: object) -> LlamaForCausalLM:
    """Two layers with two KV heads each, and large weights, so that quantizing them shows."""
    sizes = PLAIN | {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": POSITIONS}
    return with_large_weights(LlamaForCausalLM(LlamaConfig(**sizes | changes)))
