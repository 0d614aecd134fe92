"""Whether the requests of an engine can go to tiers below its pool and come back."""

from __future__ import annotations

from hfpaged.engine.model_runner import ModelRunner
from hfpaged.errors import InvalidConfigError


def check_swapping(swap_space: int | str, runner: ModelRunner) -> None:
    """Raises InvalidConfigError where nothing would ever come back."""
    if swap_space and not runner.can_share:
        why = (
            "layers with a state besides keys and values, which lies in no block"
            if runner.cache.keeps_state
            else "positions that change with the length of a prompt, so that it is computed whole"
        )
        raise InvalidConfigError(
            f"swap_space={swap_space!r} keeps blocks that others can begin with, and no sequence of this model can "
            f"begin with another's: it has {why}; leave swap_space out"
        )
