"""What a plan is about: a workload, a machine, and what one may choose between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.sizes import Sizes

# As many as `hfpaged serve` lets run by itself: beyond it each waits longer for its next token than the batch gains.
USUAL_SEQUENCES = 128


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens. Each request has `prompt` and `output` tokens in the end, none more than `context`; `concurrency` of them
    run at once, over all replicas, None for as many as fit. `shared_prefix` tokens at the beginning of all prompts are
    the same, and `encoder` tokens are read by an encoder. Raises InvalidConfigError.
    """

    prompt: int
    output: int
    context: int
    concurrency: int | None = None
    shared_prefix: int = 0
    encoder: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidConfigError("requests of 0 tokens need no plan; raise --prompt or --output")
        if self.tokens > self.context:
            raise InvalidConfigError(
                f"prompt={self.prompt} and output={self.output} are {self.tokens} tokens, more than "
                f"context={self.context}; raise --context, or lower one of them"
            )
        if self.shared_prefix > self.prompt:
            raise InvalidConfigError(
                f"shared_prefix={self.shared_prefix} is longer than the prompts of {self.prompt} tokens; "
                "give --prompt with the prefix included"
            )

    @property
    def tokens(self) -> int:
        """Of one request at its end."""
        return self.prompt + self.output

    def cut(self, tokens: int, context: int) -> Workload:
        """Requests of at most `tokens`, with prompts as large a part of them as before, and at most `context`."""
        tokens = min(tokens, self.tokens)
        prompt = round(self.prompt * tokens / self.tokens)
        return replace(
            self, prompt=prompt, output=tokens - prompt, context=max(tokens, min(context, self.context)),
            shared_prefix=min(self.shared_prefix, prompt),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What whoever starts an engine may choose. `dtype` and `weights_dtype` are as in the checkpoint where None;
    `utilization` is a share of the device, and `pool` the bytes of the pool where they are given instead. `swap_space`
    and `store_size`: bytes of the tiers in host memory and on disk, of each process.
    """

    kv_format: str = "auto"
    block_size: int = 16
    window: int | None = None
    tp: int = 1
    dtype: str | None = None
    weights_dtype: str | None = None
    token_budget: int = 4096
    replicas: int = 1
    swap_space: int = 0
    store_size: int = 0
    utilization: float = 0.85
    pool: int | None = None


@dataclass(frozen=True)
class Machine:
    """Bytes of one device, and of what others use of it now; GB/s, of its memory and of its `link` to that of the host,
    where the table of cards has them. `overhead`: what a process takes besides weights, activations and the pool.
    `origin` says where the numbers are from.
    """

    name: str
    memory: int
    origin: str = "as given"
    overhead: int = 1 << 30
    in_use: int = 0
    bandwidth: int | None = None
    link: int | None = None
    is_cpu: bool = False
    count: int = 1


@dataclass(frozen=True)
class Case:
    """One question: whether `workload` fits `machine` under `choices`."""

    sizes: Sizes = field(repr=False)
    workload: Workload
    machine: Machine
    choices: Choices
    store: str | None = None  # the directory of a prefix store

    def choosing(self, **changes: object) -> Case:
        """The same with other choices."""
        return replace(self, choices=replace(self.choices, **changes))  # type: ignore[arg-type]
