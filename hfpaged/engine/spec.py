"""The sizes and choices that an engine is made with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hfpaged.engine.preemption import POLICIES, PreemptionPolicy
from hfpaged.engine.sizing import check_share
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import Spec
from hfpaged.kv_scales import KVScales
from hfpaged.tiers_spec import NO_TIERS, TiersSpec


@dataclass(frozen=True)
class EngineSpec:
    """The arguments of ContinuousBatcher, checked. Raises InvalidConfigError."""

    memory: float | int | str | None
    num_blocks: int | None
    block_size: int
    kv_dtype: Spec
    kv_scales: KVScales | str | os.PathLike[str] | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    policy: str
    preemption: str | PreemptionPolicy
    watermark: float
    max_step_stretch: float | None
    prefix_sharing: bool
    prepack: bool | None
    cuda_graphs: bool | None
    max_num_queued_requests: int | None
    shadow: float
    debug: bool | None = None
    below: TiersSpec = NO_TIERS

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfigError(
                f"max_num_seqs={self.max_num_seqs} with max_num_batched_tokens={self.max_num_batched_tokens}: each "
                "sequence may want one token of a step; use at least 1, and as many tokens as sequences"
            )
        if self.policy not in ("fcfs", "priority"):
            raise InvalidConfigError(f'policy={self.policy!r} is unknown; use "fcfs" or "priority"')
        if isinstance(self.preemption, str) and self.preemption not in POLICIES:
            raise InvalidConfigError(f"preemption={self.preemption!r} is unknown; use one of {', '.join(POLICIES)}")
        if isinstance(self.memory, float):
            check_share(self.memory)
        self.below.check_shared(self.prefix_sharing)
        if not 0 <= self.watermark < 1:
            raise InvalidConfigError(f"watermark={self.watermark} is a share of the pool; use 0 to less than 1")
        if not 0 <= self.shadow <= 1:
            raise InvalidConfigError(f"shadow={self.shadow} is a share of the requests; use 0 to 1, such as 0.01")
        if self.max_step_stretch is not None and self.max_step_stretch <= 1:
            raise InvalidConfigError(
                f"max_step_stretch={self.max_step_stretch}: a step with prompt tokens takes longer than one without; "
                "use more than 1, or None for no limit"
            )
