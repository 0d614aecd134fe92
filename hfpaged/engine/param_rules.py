"""Which arguments of generate() one request can have, and within which bounds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hfpaged.errors import InvalidConfigError

KNOWN = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))

# Not for one request among others: name -> (values that ask for nothing, what to do instead).
_NOTHING: tuple[Any, ...] = (None, False)
_OWN_CACHE = "the batcher keeps the cache, so give it to ContinuousBatcher"
_LOGPROBS = "outputs carry tokens and text, so use logprobs= and prompt_logprobs="
_DECODING = "use sampling, num_beams=, or generate() itself"
_WHOLE_BATCH = "it is about the forward of all requests, so leave it out"
_PROMPT = "the prompt is given as text or token ids of its own, so leave it out"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len"), (_NOTHING, _OWN_CACHE)),
    **dict.fromkeys(("past_key_values", "cache", "cache_params"), (_NOTHING, _OWN_CACHE)),
    "use_cache": ((None, True), _OWN_CACHE),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), (_NOTHING, _LOGPROBS)),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), (_NOTHING, _LOGPROBS)),
    **dict.fromkeys(("assistant_model", "assistant_tokenizer", "assistant_early_exit"), (_NOTHING, _DECODING)),
    **dict.fromkeys(("is_assistant", "use_mtp", "speculation_type"), (_NOTHING, _DECODING)),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "low_memory"), (_NOTHING, _DECODING)),
    **dict.fromkeys(("custom_generate", "trust_remote_code"), (_NOTHING, _DECODING)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), ((None, 0), _DECODING)),
    "num_beam_groups": ((None, 1), _DECODING),
    "guidance_scale": ((None, 1), "it needs a second forward for each step, so use a logits_processor= of your own"),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask"), (_NOTHING, _DECODING)),
    "token_healing": (_NOTHING, "it rewrites the prompt, so heal the prompt before it is given"),
    "streamer": (_NOTHING, "use stream() instead"),
    "tokenizer": (_NOTHING, "give it to ContinuousBatcher"),
    **dict.fromkeys(("synced_gpus", "compile_config", "continuous_batching_config"), (_NOTHING, _WHOLE_BATCH)),
    "prefill_chunk_size": (_NOTHING, "use max_num_batched_tokens= of ContinuousBatcher"),
    **dict.fromkeys(("input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids"), (_NOTHING, _PROMPT)),
}
# Of those, what would make other tokens: these count also where a GenerationConfig or the model's own has them.
_OTHER_TOKENS = (
    *("guidance_scale", "dola_layers", "constraints", "force_words_ids", "num_beam_groups", "use_mtp"),
    *("assistant_early_exit", "is_assistant", "token_healing"),
)


@dataclass(frozen=True)
class _Bound:
    """What a number must be like, in a test and in words."""

    holds: Callable[[Any], bool]
    rule: str
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        is_number = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not self.holds(value):
            kind = "a whole number" if self.whole else "a number"
            raise InvalidConfigError(f"{name}={value!r} cannot be: it is {kind} {self.rule}")


def _between(low: float, high: float) -> _Bound:
    return _Bound(lambda value: low <= value <= high, f"from {low} to {high}; use one of those")


def _whole(least: int, remedy: str = "use one of those") -> _Bound:
    return _Bound(lambda value: value >= least, f"of at least {least}; {remedy}", whole=True)


_SHARE = _Bound(lambda value: 0 < value <= 1, "above 0 and at most 1; use 1 to switch it off")
_CUTOFF = _Bound(lambda value: 0 <= value < 1, "of at least 0 and below 1; use 0 to switch it off")
BOUNDS: dict[str, _Bound] = {
    "temperature": _Bound(lambda value: 0 <= value < math.inf, "of at least 0; use 0 for greedy"),
    "top_p": _Bound(lambda value: 0 < value <= 1, "above 0 and at most 1; use do_sample=False for the likeliest token"),
    "typical_p": _SHARE,
    "top_h": _SHARE,
    "min_p": _between(0, 1),
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "top_k": _whole(0, "use 0 to switch it off"),
    "repetition_penalty": _Bound(lambda value: 0 < value < math.inf, "above 0; use 1.0 for none"),
    "encoder_repetition_penalty": _Bound(lambda value: 0 < value < math.inf, "above 0; use 1.0 for none"),
    "frequency_penalty": _between(-2, 2),
    "presence_penalty": _between(-2, 2),
    "max_time": _Bound(lambda value: value > 0, "of seconds, above 0; leave it out for no limit"),
    **{name: _whole(1) for name in ("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "n")},
    **{name: _whole(1) for name in ("best_of", "prompt_lookup_num_tokens", "max_matching_ngram_size")},
    **{name: _whole(0) for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size", "logprobs")},
    **{name: _whole(0) for name in ("prompt_logprobs", "encoder_no_repeat_ngram_size")},
    "seed": _Bound(lambda value: -(2**63) <= value < 2**64, "that fits in 64 bits; use a smaller one", whole=True),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Raises InvalidConfigError for the first number that is out of its bounds; None is no value."""
    for name, bound in BOUNDS.items():
        if values.get(name) is not None:
            bound.check(name, values[name])


def check_names(names: Iterable[str], own: Collection[str]) -> None:
    """Raises InvalidConfigError for an argument that neither generate() nor `own` knows."""
    known = KNOWN | set(own)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}" if near else "use the names of transformers.GenerationConfig"
            raise InvalidConfigError(f"{name}= is no argument of generate() that a request can have; {hint}")


def check_not_refused(arguments: Mapping[str, Any]) -> None:
    """Raises InvalidConfigError for what one request among others cannot have."""
    for name, (neutral, instead) in REFUSED.items():
        if name in arguments and not _is_one_of(arguments[name], neutral):
            raise InvalidConfigError(f"{name}= is not for one request among others; {instead}")


def check_config(config: GenerationConfig) -> None:
    """Raises InvalidConfigError for settings, wherever they come from, that would make tokens in ways unknown here."""
    check_not_refused({name: getattr(config, name, None) for name in _OTHER_TOKENS})
    contrastive = not config.do_sample and (config.top_k or 0) > 1 and (config.penalty_alpha or 0) > 0
    if contrastive:
        check_not_refused({"penalty_alpha": config.penalty_alpha})


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """By == for numbers only: a tensor has no truth."""
    return any(value is one or (isinstance(value, (int, float)) and value == one) for one in neutral)
