"""transformers' QuantizedCache with the libraries behind it, as records. Both libraries are optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, QuantizedCache

from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.sides import PLAIN, Side
from hfpaged.bench.stored_prompts import fill, prompt_states

# What libraries raise where they cannot work: without a compiler, a device, or for numbers that no group divides.
FAILURES = (ImportError, OSError, RuntimeError, ValueError, AssertionError, AttributeError, KeyError)


@dataclass(frozen=True)
class Rival:
    """One way to make a QuantizedCache. `module` is what Python imports of the `package` that pip installs.

    `axis` is that of keys and values: transformers' guide advises 1 for hqq and 0 for quanto, the default is 0.
    `residual_length` is how many new tokens stay as the model computes them, None for the default of 128.
    """

    backend: str
    bits: int
    module: str
    package: str
    axis: int
    residual_length: int | None = None

    @property
    def name(self) -> str:
        """Without the bits, as in "hqq axis 1"."""
        residual = "" if self.residual_length is None else f" residual {self.residual_length}"
        return f"{self.backend} axis {self.axis}{residual}"

    @property
    def side(self) -> Side:
        """Plain transformers with this cache."""
        return Side(self.name, PLAIN.switch, self.make_cache, kv_bytes=lambda cache: tensor_bytes(cache.layers))

    def make_cache(self, model: PreTrainedModel) -> Any:
        options: dict[str, Any] = {"nbits": self.bits, "axis_key": self.axis, "axis_value": self.axis}
        if self.residual_length is not None:
            options["residual_length"] = self.residual_length
        return QuantizedCache(self.backend, model.config, **options)

    def with_residual(self, length: int) -> Rival:
        return replace(self, residual_length=length)

    @property
    def on_default_axis(self) -> Rival:
        return replace(self, axis=0)


HQQ_8 = Rival("hqq", 8, "hqq", "hqq", axis=1)
HQQ_4 = replace(HQQ_8, bits=4)
QUANTO_4 = Rival("quanto", 4, "optimum.quanto", "optimum-quanto", axis=0)


def not_measured(reason: str) -> Measured:
    """A row without figures that says why."""
    return Measured(None, note=f"not measured: {reason}")


def obstacle(rival: Rival, setting: Setting, shape: Shape) -> str | None:
    """Why `rival` cannot be measured, None where it can: it is given the prompts of one layer, and one token more."""
    if not _is_installed(rival.module):
        return f"pip install {rival.package}"
    layer, states = next(iter(prompt_states(setting, shape.batch, shape.prompt).items()))
    try:
        cache = rival.make_cache(setting.model)
        fill(cache, {layer: states})
        fill(cache, {layer: states}, stop=1)  # reads what is stored
    except FAILURES as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{rival.name} fails: {reason}"
    return None


def _is_installed(module: str) -> bool:
    """Without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def tensor_bytes(held: Any) -> int:
    """Bytes of all tensors in layers and containers, quantized ones with their scales and residuals alike."""
    if isinstance(held, Tensor):
        parts = held.__tensor_flatten__()[0] if hasattr(held, "__tensor_flatten__") else None
        return held.nbytes if parts is None else sum(tensor_bytes(getattr(held, name)) for name in parts)
    if isinstance(held, Mapping):
        return sum(map(tensor_bytes, held.values()))
    if isinstance(held, list | tuple):
        return sum(map(tensor_bytes, held))
    return tensor_bytes(vars(held)) if hasattr(held, "get_seq_length") else 0
