"""What one request asks for, resolved once against the model: generate()'s own settings, and those of `OwnParams`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hfpaged import compat_generation
from hfpaged.engine import own_params, param_rules
from hfpaged.engine.own_params import OwnParams
from hfpaged.errors import InvalidConfigError

AllowedTokens = Callable[[int, Tensor], list[int]]


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """A request's own functions, as generate() takes them."""

    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    stopping_criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    prefix_allowed_tokens_fn: AllowedTokens | None = None

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Callbacks:
        """Taken out of `arguments`; a single processor or criterion is as good as a list of one."""
        return cls(
            logits_processor=LogitsProcessorList(_listed(arguments.pop("logits_processor", None))),
            stopping_criteria=StoppingCriteriaList(_listed(arguments.pop("stopping_criteria", None))),
            prefix_allowed_tokens_fn=arguments.pop("prefix_allowed_tokens_fn", None),
        )


@dataclass(frozen=True, kw_only=True)
class RequestParams(OwnParams, Callbacks):
    """The settings of one request, as they came out of its arguments, the model's defaults and transformers' own.

    config              as generate() has it when it starts: lengths with the prompt, special tokens as tensors
    max_new_tokens      the most tokens that a sequence gets
    stop_token_ids      tokens that end a sequence
    stop_strings        all strings that end one
    seed                None for greedy requests only: others without one are given one

    The rest is described at OwnParams.
    """

    config: GenerationConfig
    prompt_length: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()

    @property
    def do_sample(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def num_beams(self) -> int:
        return int(self.config.num_beams)

    @property
    def n(self) -> int:
        """How many sequences are given back."""
        return int(self.config.num_return_sequences)

    @property
    def num_sequences(self) -> int:
        """How many sequences are sampled (beams are another matter)."""
        return self.best_of or self.n

    @property
    def min_new_tokens(self) -> int:
        """No end-of-sequence token comes before so many."""
        return max(0, int(self.config.min_length or 0) - self.prompt_length)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens, in order, as generate() knows them; none with ignore_eos."""
        eos = self.config._eos_token_tensor
        return () if eos is None else tuple(eos.tolist())

    @property
    def pad_token_id(self) -> int | None:
        pad = self.config._pad_token_tensor
        return None if pad is None else int(pad)

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a step must give logprobs of: best-of needs those of the chosen tokens in any case."""
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs

    @property
    def prompt_lookup_num_tokens(self) -> int | None:
        """How many tokens to propose by looking them up in the sequence; None: no speculation."""
        found: int | None = self.config.prompt_lookup_num_tokens
        return found


def resolve_params(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt_length: int,
    generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    **arguments: Any,
) -> RequestParams:
    """The settings of a request whose prompt has `prompt_length` tokens.

    `arguments` are those of generate() by its names (max_tokens, min_tokens and n are names too), and the fields of
    OwnParams. They stand above `generation_config`, whose dict may hold any of them, and that above the model's own.
    temperature=0 means greedy. Raises InvalidConfigError for names that nobody knows, values that cannot be, and what
    is not for one request among others.
    """
    if isinstance(generation_config, Mapping):
        arguments, generation_config = {**generation_config, **arguments}, None
    param_rules.check_not_refused(arguments)
    arguments = own_params.without_aliases({k: v for k, v in arguments.items() if k not in param_rules.REFUSED})
    callbacks = Callbacks.of(arguments)
    param_rules.check_names(arguments, own_params.NAMES)
    given = {name: arguments.pop(name) for name in own_params.NAMES & set(arguments)}
    own = OwnParams(**{name: value for name, value in given.items() if value is not None})
    own.check_tokens(model.config.get_text_config().vocab_size)
    config = _config(model, generation_config, arguments, prompt_length, own)
    return _params(config, own, callbacks, prompt_length, tokenizer)


def _config(
    model: PreTrainedModel,
    given: GenerationConfig | None,
    arguments: dict[str, Any],
    prompt_length: int,
    own: OwnParams,
) -> GenerationConfig:
    """generate()'s own config, checked."""
    param_rules.check_values(arguments)
    if own.ignore_eos:
        arguments["eos_token_id"] = None
    try:
        config = compat_generation.generation_config_of(model, given, arguments, prompt_length)
    except ValueError as error:
        raise InvalidConfigError(f"generate() refuses these settings: {error}") from error
    _complete(config)
    param_rules.check_values(vars(config))
    param_rules.check_config(config)
    _check_counts(config, own, prompt_length)
    return config


def _complete(config: GenerationConfig) -> None:
    """Numbers that were given as None or as whole ones, of which transformers wants others."""
    config.num_beams = 1 if config.num_beams is None else config.num_beams
    config.num_return_sequences = 1 if config.num_return_sequences is None else config.num_return_sequences
    if config.temperature == 0:
        config.do_sample, config.temperature = False, 1.0
    for name in ("temperature", "repetition_penalty", "encoder_repetition_penalty"):
        value = getattr(config, name)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, float(value))


def _check_counts(config: GenerationConfig, own: OwnParams, prompt_length: int) -> None:
    """Raises InvalidConfigError for numbers that do not go together."""
    n, beams, best_of = config.num_return_sequences, config.num_beams, own.best_of
    if config.max_length <= prompt_length:
        raise InvalidConfigError(
            f"the prompt has {prompt_length} tokens and max_length is {config.max_length} with the prompt, so nothing "
            "could be generated; use max_new_tokens"
        )
    if best_of is not None and (best_of < n or beams > 1):
        raise InvalidConfigError(
            f"best_of={best_of} sequences with n={n} and num_beams={beams}: the n best are chosen of as many or more, "
            "and without beams; use best_of >= n, or num_beams"
        )
    if max(n, best_of or 1) > 1 and beams == 1 and not config.do_sample:
        raise InvalidConfigError(
            f"n={n}, best_of={best_of} of a greedy request would be the same sequence each time; "
            "use do_sample=True or num_beams"
        )
    if beams > 1 and own.logprobs is not None:
        raise InvalidConfigError(
            f"logprobs={own.logprobs} with num_beams={beams}: beams have one score each (cumulative_logprob) and no "
            "logprobs of their tokens; leave logprobs= out, or use sampling"
        )
    if beams > 1 and n > beams:
        raise InvalidConfigError(f"n={n} sequences cannot come from num_beams={beams}; use at least as many beams")


def _params(
    config: GenerationConfig,
    own: OwnParams,
    callbacks: Callbacks,
    prompt_length: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> RequestParams:
    """All of it together; a criterion of the request's own takes the place of generate()'s of the same class."""
    criteria = {type(criterion): criterion for criterion in callbacks.stopping_criteria}
    eos, length = criteria.get(EosTokenCriteria), criteria.get(MaxLengthCriteria)
    stop_ids = config._eos_token_tensor if eos is None else eos.eos_token_id
    max_length = config.max_length if length is None else max(length.max_length, prompt_length + 1)
    strings = () if StopStringCriteria in criteria else own_params.stop_strings("stop_strings", config.stop_strings)
    strings += own.stop
    if strings and tokenizer is None:
        raise InvalidConfigError(
            f"stop strings {list(strings)} are compared with text, and there is no tokenizer to make it; "
            "give one to ContinuousBatcher, or use eos_token_id"
        )
    fields = vars(own) | vars(callbacks)
    if config.do_sample and own.seed is None:
        fields["seed"] = own_params.fresh_seed()
    return RequestParams(
        **fields,
        config=config,
        prompt_length=prompt_length,
        max_new_tokens=max_length - prompt_length,
        stop_token_ids=frozenset(() if stop_ids is None else stop_ids.tolist()),
        stop_strings=tuple(dict.fromkeys(strings)),
    )


def _listed(given: Any) -> Iterable[Any]:
    if given is None:
        return ()
    return given if isinstance(given, (list, tuple)) else (given,)
