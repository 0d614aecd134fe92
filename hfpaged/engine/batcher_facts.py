"""What can be asked of a batcher at any time: nothing here changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel

from hfpaged import compat
from hfpaged.engine.assembly import Assembly
from hfpaged.engine.events import Hook
from hfpaged.engine.intake import Intake
from hfpaged.engine.loop import EngineLoop
from hfpaged.engine.rank_group import OneProcess, RankGroup
from hfpaged.kv_pool import KVPool

if TYPE_CHECKING:
    from hfpaged.doctor import Diagnosis
    from hfpaged.engine.batcher import ContinuousBatcher
    from hfpaged.memory_map import MemoryMap


class BatcherFacts:
    """The part of ContinuousBatcher that reads."""

    _parts: Assembly
    _intake: Intake
    _group: RankGroup | OneProcess
    loop: EngineLoop

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers, without what wraps it."""
        return compat.transformers_model(self._parts.runner.model)

    @property
    def is_leader(self) -> bool:
        """Whether requests go to this process: rank 0 of those that compute the model together, or the only one."""
        return self._group.leads

    @property
    def fault(self) -> str | None:
        """Why the ranks that compute the model together cannot go on; None while all is well."""
        return self._group.fault

    @property
    def pool(self) -> KVPool:
        """The block pool: `num_free`, `stats()`, `check_integrity()`."""
        return self._parts.engine.pool

    @property
    def hooks(self) -> list[Hook]:
        """Functions that are told of each event."""
        return self._parts.engine.tells.hooks

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.loop.has_work

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._intake.is_closed

    @property
    def limits(self) -> dict[str, int]:
        """max_num_seqs, max_num_batched_tokens, and max_model_len where there is one."""
        sizes, longest = self._parts.scheduler.limits.sizes, self._parts.max_model_len
        return sizes if longest is None else sizes | {"max_model_len": longest}

    def requests_with_blocks(self) -> set[str]:
        """The ids of the requests that hold blocks."""
        with self.pool.changing():
            return {group.request.request_id for group in self._parts.scheduler.running}

    def memory_map(self) -> MemoryMap:
        """Which request holds which block of the pool now, those of this batcher first: to print, or to `plot()`."""
        return self.pool.memory_map(self._parts.scheduler)

    def describe(self) -> dict[str, Any]:
        """What was decided at construction: sizes, formats, how the model is computed."""
        return self._parts.describe()

    def diagnose(self) -> Diagnosis:
        """Findings: what is wrong, by which figures, and what to change, the most important first. print() it."""
        from hfpaged.doctor import diagnose

        return diagnose(cast("ContinuousBatcher", self))
