"""Tiny tokenizers of the kinds that there are, made here: how they make text of tokens is what differs."""

from __future__ import annotations

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "stop stops stopping stopped, stop.",
    "don't you see? I can't, we've said they're here!",
    "naïve café, Ünïcödé and ångström",
    "你好世界 你好吗 世界很大",
    "emoji 🙂🙂 and 👨‍👩‍👧 and e\u0301 combined",
] * 3
SPECIAL = ["<s>", "</s>", "<unk>"]


def _fast(tokenizer: Tokenizer, **options) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|name|>", special=True)])
    tokenizer.add_tokens([AddedToken("[tool]", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options
    )


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's: each token some bytes, so that a token can be half a character."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Like Llama 2's: words begin with a space that the first one loses, and what has no token is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    plain = [line.replace(" ", "▁") for line in CORPUS if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + spelled, show_progress=False)
    tokenizer.train_from_iterator(plain, trainer)
    return _fast(_without_added(tokenizer, spelled))


def _without_added(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """The trainer adds its special tokens as such; bytes are plain ones."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in tokens]
    return Tokenizer.from_str(json.dumps(state))


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """Like T5's: the decoder takes the first space away from the first token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer)


@functools.cache
def word_piece() -> PreTrainedTokenizerFast:
    """Like BERT's: a space between words that is not in the tokens, and spaces cleaned up behind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer, clean_up_tokenization_spaces=True)


ALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_piece": word_piece}
