"""Whether the requests of an engine can go to tiers below its pool and come back."""

from __future__ import annotations

from hfpaged.engine.model_runner import ModelRunner
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_pool import KVPool
from hfpaged.tiers_spec import TiersSpec

# An engine that is closed waits so long for what was not written yet.
SECONDS_AT_CLOSE = 5.0


def check_swapping(below: TiersSpec, runner: ModelRunner) -> None:
    """Raises InvalidConfigError where nothing would ever come back."""
    if below.said and not runner.can_share:
        why = (
            "layers with a state besides keys and values, which lies in no block"
            if runner.cache.keeps_state
            else "positions that change with the length of a prompt, so that it is computed whole"
        )
        raise InvalidConfigError(
            f"{below.said} keeps blocks that others can begin with, and no sequence of this model can begin with "
            f"another's: it has {why}; leave it out"
        )


def read_ahead(pool: KVPool) -> None:
    """Steps wait for no disk: requests do, before they begin."""
    if pool.swapping is not None and pool.swapping.lower is not None:
        pool.swapping.lower.read_ahead()


def told_store(pool: KVPool) -> str | None:
    """What is below host memory, for people; None for nothing."""
    return None if pool.swapping is None or pool.swapping.lower is None else str(pool.swapping.lower)


def settle_store(pool: KVPool) -> None:
    """Who is closed in peace has written what it computed."""
    if pool.swapping is not None and pool.swapping.lower is not None:
        pool.swapping.lower.settle(SECONDS_AT_CLOSE)
