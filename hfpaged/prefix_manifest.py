"""What stands in a file of saved prefixes besides keys and values: the manifest, as JSON, and the trees, as tensors."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hfpaged.block_hash import ExtraKey
from hfpaged.kv_format import KVFormat, block_shape, storage_dtype
from hfpaged.kv_storage import LayerStore
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_tree import FlatTree, Place
from hfpaged.tensor_file import TensorSpec

# Files of another number are not read. It rises when older readers would misunderstand newer files.
FORMAT = 1
_LIBRARIES = ("hfpaged", "torch", "transformers", "safetensors")


PARTS = ("key", "value")


@dataclass(frozen=True)
class LayerKind:
    """Keys and values of one layer: heads, sizes, and the dtypes in which the model computes them."""

    heads: int
    key_dim: int
    value_dim: int
    key_dtype: str
    value_dtype: str

    def __post_init__(self) -> None:
        for part in PARTS:
            self.dtype(part)

    def dtype(self, part: str) -> torch.dtype:
        """Of "key" or "value". Raises ValueError for what is none."""
        found = getattr(torch, self.key_dtype if part == "key" else self.value_dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"unknown dtype of {self}")
        return found

    def dim(self, part: str) -> int:
        return self.key_dim if part == "key" else self.value_dim


def kind_of(store: LayerStore) -> LayerKind:
    """What a layer with this store keeps."""
    heads, key_dim, value_dim, *dtypes, _ = store.signature
    key_dtype, value_dtype = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return LayerKind(int(str(heads)), int(str(key_dim)), int(str(value_dim)), key_dtype, value_dtype)


@dataclass(frozen=True)
class Manifest:
    """Everything that must fit before a pool can take the blocks in."""

    block_size: int
    kv_format: str
    groups: tuple[LayerGroup, ...]
    layers: dict[int, LayerKind]
    roots: list[tuple[int, tuple[ExtraKey, ...]]]  # (width, keys), the least recently used first
    versions: dict[str, str]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **vars(self)}, default=vars)


def installed_versions() -> dict[str, str]:
    """Of the libraries that may build another model of the same config, and of our own."""
    return {name: _version(name) for name in _LIBRARIES}


_version = cache(version)  # which reads the whole description of a package, in milliseconds


def parse_manifest(text: str) -> Manifest:
    """Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for what `to_json` did not write."""
    parts = json.loads(text)
    if parts["format"] != FORMAT:
        raise ValueError(f"its format is number {parts['format']}, this version of hfpaged reads {FORMAT}")
    return Manifest(
        block_size=int(parts["block_size"]),
        kv_format=str(parts["kv_format"]),
        groups=tuple(LayerGroup(group["window"], tuple(map(int, group["layers"]))) for group in parts["groups"]),
        layers={int(layer): LayerKind(**kind) for layer, kind in parts["layers"].items()},
        roots=[(int(width), tuple(ExtraKey(str(k), str(v)) for k, v in keys)) for width, keys in parts["roots"]],
        versions={str(name): str(number) for name, number in parts["versions"].items()},
    )


def tree_tensors(tree: FlatTree) -> dict[str, Tensor]:
    """The trees as int64 tensors: `tree.roots` and `tree.parents` [nodes], `tree.tokens` [numbers of all nodes, one
    after the other], `tree.order` [blocks, 2] (node, layer group).
    """
    tokens = array("q")
    for items in tree.items:
        tokens.extend(items)
    return {
        "tree.roots": torch.tensor(tree.root_of, dtype=torch.int64),
        "tree.parents": torch.tensor(tree.parents, dtype=torch.int64),
        "tree.tokens": torch.frombuffer(tokens, dtype=torch.int64) if tokens else torch.empty(0, dtype=torch.int64),
        "tree.order": torch.tensor(tree.order, dtype=torch.int64).reshape(-1, 2),
    }


def read_tree(manifest: Manifest, tensors: Mapping[str, Tensor]) -> FlatTree:
    """Undo `tree_tensors`. Raises ValueError or KeyError for what is no tree."""
    root_of, parents = tensors["tree.roots"].tolist(), tensors["tree.parents"].tolist()
    order = [Place(*place) for place in tensors["tree.order"].tolist()]
    if not set(root_of) <= set(range(len(manifest.roots))):
        raise ValueError("a block of it belongs to no root")
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError("a block of it comes before the one that it follows")
    if any(parent >= 0 and root_of[parent] != root for parent, root in zip(parents, root_of, strict=True)):
        raise ValueError("a block of it follows one of another root")
    nodes, groups = range(len(parents)), range(len(manifest.groups))
    if len(set(order)) < len(order) or any(p.node not in nodes or p.group not in groups for p in order):
        raise ValueError("the list of its blocks names one twice, or one that is not there")
    sizes = [manifest.block_size * manifest.roots[root][0] for root in root_of]
    return FlatTree(manifest.roots, root_of, parents, _split(tensors["tree.tokens"], sizes), order)


def _split(tokens: Tensor, sizes: list[int]) -> list[array[int]]:
    if tokens.dtype != torch.int64 or tokens.numel() != sum(sizes) or min(sizes, default=1) < 1:
        raise ValueError(f"it has {tokens.numel()} token numbers and its blocks need {sum(sizes)}")
    numbers = array("q", tokens.numpy().tobytes())
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [numbers[start:end] for start, end in pairwise(ends)]


def layer_specs(manifest: Manifest, tree: FlatTree, kv_format: KVFormat) -> list[TensorSpec]:
    """What is in the file of each layer: "layer.3.key" and "layer.3.value", the blocks of its group as they lie in a
    pool with this format: [blocks, num_kv_heads, block_size, dim], or [blocks, num_kv_heads, bytes] with their scales.
    """
    specs = []
    for number, group in enumerate(manifest.groups):
        count = sum(place.group == number for place in tree.order)
        for layer in group.layers:
            for part in PARTS if layer in manifest.layers else ():
                kind, stored = manifest.layers[layer], kv_format.of_layer(layer).part(part)
                block = block_shape(stored, kind.heads, manifest.block_size, kind.dim(part))
                dtype = storage_dtype(stored, kind.dtype(part))
                specs.append(TensorSpec(f"layer.{layer}.{part}", dtype, (count, *block)))
    return specs


def num_tokens(places: Iterable[Place], block_size: int) -> int:
    """For how many tokens there are blocks in at least one layer group."""
    return len({place.node for place in places}) * block_size


def describe(parts: Any) -> str:
    """Layer groups for a message: "full attention: layers 0, 2; window 12: layers 1, 3"."""
    return "; ".join(
        f"{'full attention' if group.window is None else f'window {group.window}'}: layers "
        + ", ".join(map(str, group.layers))
        for group in parts
    )
