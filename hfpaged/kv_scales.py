"""Static scales for fp8: calibrated once on texts, kept in a file, and valid for one model alone.

A scale per token and head follows each key, but must be computed and stored with each. A static one costs nothing when
keys are written and read; in return it has to fit numbers that nobody has seen yet, which is what the margin is for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfpaged.errors import KVScalesError
from hfpaged.tensor_file import FileKind, TensorSpec, open_file, spec_of, write_file

FORMAT = 1  # files of another number are not read
# The largest number of each format that can have static scales.
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
# What later texts may exceed the calibrated ones by. Floating point loses nothing by it but its smallest numbers.
MARGIN = 2.0

_KIND = FileKind("static scales", "calibrate again with `hfpaged quality --calibrate`", KVScalesError)
_PARTS = ("key", "value")


class LayerAmax(NamedTuple):
    """The largest absolute key and value of each head: float32 [num_kv_heads] on the CPU."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class KVScales:
    """What `hfpaged quality --calibrate` has found. `kv_format` is what it was made for, `fingerprint` that of the
    model (the first of `fingerprint.model_keys`), `layers` has one entry for each layer that stores keys.
    """

    kv_format: str
    fingerprint: str
    layers: Mapping[int, LayerAmax]

    def scales(self, layer: int, margin: float = MARGIN) -> tuple[Tensor, Tensor]:
        """By which stored keys and values of this layer are to be multiplied: float32 [num_kv_heads] each. Heads that
        were always zero have 1. Raises KVScalesError for a layer that was not there when the file was made.
        """
        if layer not in self.layers:
            raise KVScalesError(
                f"the scales are for {len(self.layers)} layers, and layer {layer} is none of them; {_KIND.remedy}"
            )
        key, value = (_scale(amax, margin / LARGEST[self.kv_format]) for amax in self.layers[layer])
        return key, value

    @property
    def identity(self) -> str:
        """Twelve digits of a hash of all this: blocks that were written with other scales cannot be read with these."""
        digest = hashlib.sha256(f"{self.kv_format} {self.fingerprint}".encode())
        for name, tensor in self._tensors():
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()[:12]

    def check_model(self, fingerprint: str) -> None:
        """Raises KVScalesError for another model than the one that was calibrated."""
        if fingerprint != self.fingerprint:
            raise KVScalesError(
                f"the scales are of the model with fingerprint {self.fingerprint[:12]}..., this one has "
                f"{fingerprint[:12]}...: its weights, dtype or config are others; {_KIND.remedy}"
            )

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a safetensors file, complete or not at all; returns its bytes. Raises OSError."""
        tensors = dict(self._tensors())
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        manifest = {"format": FORMAT, "kv_format": self.kv_format, "model": self.fingerprint}
        manifest["layers"] = list(self.layers)
        return write_file(path, json.dumps(manifest), specs, tensors.values())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVScales:
        """Read what `save` wrote. Raises KVScalesError for anything else, OSError where it cannot be read."""
        with open_file(path, _KIND) as file:
            try:
                return cls._read(file)
            except (ValueError, KeyError, TypeError) as error:
                raise KVScalesError(f"{os.fspath(path)!r} cannot be understood: {error}; {_KIND.remedy}") from error

    @classmethod
    def _read(cls, file: Any) -> KVScales:
        parts = json.loads(file.metadata()["manifest"])
        if parts["format"] != FORMAT:
            raise ValueError(f"its format is number {parts['format']}, this version of hfpaged reads {FORMAT}")
        if parts["kv_format"] not in LARGEST:
            raise ValueError(f"it is for {parts['kv_format']!r}, and static scales are for {', '.join(LARGEST)}")
        layers = {int(layer): LayerAmax(*(_amax(file, layer, part) for part in _PARTS)) for layer in parts["layers"]}
        return cls(str(parts["kv_format"]), str(parts["model"]), layers)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for layer, amax in self.layers.items():
            for part in _PARTS:
                yield f"layer.{layer}.{part}", getattr(amax, part)


def _amax(file: Any, layer: int, part: str) -> Tensor:
    name = f"layer.{layer}.{part}"
    spec = spec_of(file, name)
    if spec is None or spec.dtype != torch.float32 or len(spec.shape) != 1:
        raise ValueError(f"{name} is {spec} and should be float32 [num_kv_heads]")
    tensor: Tensor = file.get_tensor(name)
    if not bool((tensor.isfinite() & (tensor >= 0)).all()):
        raise ValueError(f"{name} holds numbers that are no sizes")
    return tensor


def _scale(amax: Tensor, factor: float) -> Tensor:
    return torch.where(amax > 0, amax * factor, 1.0)
