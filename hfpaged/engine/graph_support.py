"""Where decode steps can be recorded, and of which sizes."""

from __future__ import annotations

from hfpaged import compat
from hfpaged.engine.cuda_capture import CudaCapture
from hfpaged.engine.decode_graphs import DecodeGraphs
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.errors import InvalidConfigError
from hfpaged.fingerprint import hook_keys, single_device
from hfpaged.spread import has_hooks


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8 and so on, and the most that there may be."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    return sorted({*powers, max_num_seqs})


def why_no_graphs(runner: ModelRunner, device_type: str = "cuda") -> str | None:
    """Why steps of this model cannot be recorded, as far as one can tell before it is tried; None where they can."""
    model, pool = compat.transformers_model(runner.model), runner.cache.pool
    if runner.device.type != device_type:
        return f"the model is on {runner.device.type}, graphs are made on {device_type}"
    if single_device(model) is None or (getattr(model, "tp_size", None) or 1) > 1:
        return "the model is spread over several devices"
    if has_hooks(model):
        return "accelerate's hooks on its modules, which a recorded forward does not call"
    if not runner.packs:
        return f"its sequences are computed one by one: {runner.why_separate}"
    if runner.cache.keeps_state:
        return "it has layers that keep more than keys and values"
    if pool.residuals is not None:
        return f"{pool.kv_format.title} keeps unfilled blocks in residuals, which are planned on the host"
    if compat.longest_with_same_positions(model.config) is not None:
        return "its rotary positions depend on lengths that are read on the host"
    if hook_keys(model):
        return "hooks on its modules, which a recorded forward does not call"
    return None


def make_graphs(runner: ModelRunner, wanted: bool | None, max_num_seqs: int, longest: int | None) -> DecodeGraphs:
    """The graphs of a model: none for `wanted` False, those that turn out to be possible for None, and all at once for
    True, which raises InvalidConfigError where none can be.
    """
    reason = "cuda_graphs=False" if wanted is False else why_no_graphs(runner)
    graphs = DecodeGraphs(
        runner.model, runner.cache, CudaCapture(runner.device), graph_sizes(max_num_seqs), longest=longest,
        why_off=reason or "",
    )  # fmt: skip
    if wanted:
        graphs.check_model()
        graphs.capture_all()
        if graphs.why_off:
            raise InvalidConfigError(f"cuda_graphs=True, and there can be none: {graphs.why_off}; leave it out")
    return graphs
