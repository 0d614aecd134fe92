"""KV formats: how keys and values lie in memory, as records.

What "int4" is made of, and what was tried for it: SmolLM2-135M, head dim 64, blocks of 16, 3,072 tokens of the texts
that `hfpaged quality` brings along, in 24 contexts of 128; keys and values are replaced by what would be read. Bytes
are against bfloat16, scales included; channel scales take 8 bits each but where it says bfloat16.

    keys                                      values     bytes   perplexity  top-1    KL
    per token                                 per token  28.1 %  + 8.4 %     79.4 %   0.117
    groups of 32                              per token  29.7 %  + 3.8 %     85.0 %   0.057
    rotated (Hadamard), per token             per token  28.1 %  + 2.1 %     85.2 %   0.053
    rotated, groups of 32                     per token  29.7 %  + 2.3 %     87.1 %   0.044
    centred and scaled by statistics of other
    text, rotated, groups of 32               per token  29.7 %  + 2.6 %     88.4 %   0.032
    per channel of a block                    per token  29.9 %  + 1.1 %     92.4 %   0.016
    rotated, per channel of a block           per token  29.9 %  + 0.9 %     91.8 %   0.017
    with the unfilled block as computed (in its first row that of the keys alone):
    per channel of a block                    per token  29.9 %  + 0.4 %     92.7 %   0.013
    rotated, groups of 32                     per token  29.7 %  + 0.6 %     93.6 %   0.011
    per channel of a block, bfloat16 scales   per token  32.8 %  + 0.5 %     95.2 %   0.0053
    per channel of a block: "int4"            per token  29.9 %  + 0.5 %     95.5 %   0.0054
    per channel of a block                    rotated    29.9 %  + 0.5 %     95.8 %   0.0044
    per channel, first 4 tokens as computed   per token  29.9 %  + 0.2 %     96.6 %   0.0029

The last two are better at almost equal bytes and not done: rotated values need their outputs turned back, first tokens
as computed a second residual of each sequence in the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hfpaged_kernels import encoding
from hfpaged_kernels.encoding import Encoding

from hfpaged.errors import InvalidConfigError
from hfpaged.kv_names import known_name

# What is stored of keys or values: numbers of a dtype, codes, or (None) what the model computes.
Part = torch.dtype | Encoding | None


@dataclass(frozen=True)
class KVFormat:
    """What is stored of keys and of values, and which layers are `exempt`: they have a format of their own.

    A format of four bits keeps the block of a sequence that is not full yet as the model computes it, its residual (the
    word of Liu et al. 2024, "KIVI", arXiv 2402.02750), and quantizes it when it is full.
    """

    name: str
    key: Part
    value: Part
    exempt: tuple[tuple[int, KVFormat], ...] = ()

    @property
    def title(self) -> str:
        """The name with those of exempt layers: equal titles are equal formats."""
        return ", ".join([self.name, *(f"layer {layer} {own.name}" for layer, own in self.exempt)])

    @property
    def has_residuals(self) -> bool:
        """Whether layers that are not exempt keep unfilled blocks as the model computes them."""
        return any(isinstance(part, Encoding) and part.bits < 8 for part in (self.key, self.value))

    @property
    def is_quantized(self) -> bool:
        return any(isinstance(part, Encoding) for part in (self.key, self.value))

    @property
    def all(self) -> tuple[KVFormat, ...]:
        """The formats of all layers, each once."""
        return (replace(self, exempt=()), *dict.fromkeys(kv_format for _, kv_format in self.exempt))

    def of_layer(self, layer: int) -> KVFormat:
        """The format of one layer."""
        return dict(self.exempt).get(layer) or replace(self, exempt=())

    def part(self, name: str) -> Part:
        """That of "key" or "value"."""
        return self.key if name == "key" else self.value


def storage_dtype(part: Part, computed: torch.dtype) -> torch.dtype:
    """The dtype in the pool for numbers that the model computes as `computed`; uint8 for all that is quantized."""
    return torch.uint8 if isinstance(part, Encoding) else part or computed


def block_shape(part: Part, heads: int, block_size: int, dim: int) -> tuple[int, ...]:
    """The shape of one block in the pool."""
    if isinstance(part, Encoding):
        return heads, part.head_bytes(block_size, dim)
    return heads, block_size, dim


_NATIVE: dict[str, Part] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_EIGHT_BITS: dict[str, Part] = {fmt.name: fmt for fmt in (encoding.INT8, encoding.FP8_E4M3, encoding.FP8_E5M2)}
_STATIC = {"fp8_e4m3": encoding.FP8_E4M3_STATIC, "fp8_e5m2": encoding.FP8_E5M2_STATIC}
_KEYS = _NATIVE | _EIGHT_BITS | {"int4": encoding.INT4_CHANNEL}
_VALUES = _NATIVE | _EIGHT_BITS | {"int4": encoding.INT4_GROUPS}

FORMATS = {
    **{name: KVFormat(name, part, part) for name, part in (_NATIVE | _EIGHT_BITS).items()},
    "k8v4": KVFormat("k8v4", encoding.INT8, encoding.INT4_GROUPS),
    "int4": KVFormat("int4", encoding.INT4_CHANNEL, encoding.INT4),
}

Spec = str | torch.dtype | KVFormat | Mapping[str, Any]


def resolve_format(kv_dtype: Spec) -> KVFormat:
    """The record for what users write: a name, a torch dtype, "int8/auto" for keys and values apart, or a mapping with
    "default" and "layers" (layer number -> any of these).

    Raises InvalidConfigError with the names that exist.
    """
    if isinstance(kv_dtype, KVFormat):
        return kv_dtype
    if isinstance(kv_dtype, Mapping):
        return _by_layer(kv_dtype)
    name, parts = known_name(str(kv_dtype), FORMATS, _KEYS, _VALUES)
    return FORMATS[name] if parts is None else KVFormat(name, _KEYS[parts[0]], _VALUES[parts[1]])


def _by_layer(kv_dtype: Mapping[str, Any]) -> KVFormat:
    layers = kv_dtype.get("layers", {})
    if not {"default", "layers"} >= kv_dtype.keys() or not isinstance(layers, Mapping):
        raise InvalidConfigError(
            f"kv_dtype={dict(kv_dtype)!r}: a mapping has the keys 'default' and 'layers', and 'layers' one format for "
            "each layer number, as in {'default': 'int8', 'layers': {0: 'auto'}}"
        )
    default = resolve_format(kv_dtype.get("default", "auto"))
    return with_exempt(default, [(_layer_number(layer), resolve_format(spec)) for layer, spec in layers.items()])


def with_exempt(default: KVFormat, layers: Iterable[tuple[int, KVFormat]]) -> KVFormat:
    """`default` for all layers but those that are given with a format of their own."""
    exempt = tuple(sorted({layer: own for layer, own in layers if own != default}.items(), key=lambda pair: pair[0]))
    return replace(default, exempt=exempt)


def _layer_number(layer: object) -> int:
    """A layer's number, which JSON and command lines write as text."""
    text = str(layer)
    if isinstance(layer, bool) or not text.isascii() or not text.isdigit():
        raise InvalidConfigError(f"kv_dtype: layer {layer!r} is no layer number; layers count from 0")
    return int(text)


def with_static_scales(kv_format: KVFormat, name: str, identity: str) -> KVFormat:
    """`kv_format` with one scale per head, known in advance, wherever it stores the fp8 format `name`; `identity` tells
    these scales from others. Raises InvalidConfigError where it nowhere does.
    """
    exempt = tuple((layer, _with_static(each, name)) for layer, each in kv_format.exempt)
    static = replace(_with_static(kv_format, name), name=f"{kv_format.name} with scales {identity}", exempt=exempt)
    if not any(map(has_static_scales, static.all)):
        raise InvalidConfigError(
            f"kv_scales= are for {name}, and kv_dtype={kv_format.title!r} stores none; leave one of them out"
        )
    return static


def has_static_scales(kv_format: KVFormat) -> bool:
    """Whether layers that are not exempt store something with one scale per head."""
    return any(isinstance(part, Encoding) and part.scales == "head" for part in (kv_format.key, kv_format.value))


def _with_static(kv_format: KVFormat, name: str) -> KVFormat:
    key, value = (_STATIC[name] if part == _EIGHT_BITS[name] else part for part in (kv_format.key, kv_format.value))
    return replace(kv_format, key=key, value=value)


def check_dims(kv_format: KVFormat, key_dim: int, value_dim: int) -> None:
    """Raises InvalidConfigError for a format that cannot store rows of such dims."""
    for what, part, dim in (("keys", kv_format.key, key_dim), ("values", kv_format.value, value_dim)):
        if isinstance(part, Encoding) and not part.fits(dim):
            raise InvalidConfigError(
                f"kv_dtype={kv_format.name!r} packs {8 // part.bits} numbers into a byte, and {what} of this model "
                f"have head dim {dim}, which is odd; use {', '.join(_EIGHT_BITS)} or auto"
            )


def check_layers(kv_format: KVFormat, layers: Iterable[int]) -> None:
    """Raises InvalidConfigError where a layer has a format of its own that is none of `layers`."""
    known = sorted(layers)
    for layer, own in kv_format.exempt:
        if layer not in known:
            raise InvalidConfigError(
                f"kv_dtype gives layer {layer} the format {own.name}, and the layers of this model with keys and "
                f"values are {known[0] if known else 'none'} to {known[-1] if known else 'none'}"
            )
