"""Writing the published prefixes of a pool into a file, with which another process starts warm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfpaged.errors import PrefixFileError
from hfpaged.kv_storage import LayerStore
from hfpaged.prefix_manifest import (
    PARTS,
    Manifest,
    installed_versions,
    kind_of,
    layer_specs,
    num_tokens,
    tree_tensors,
)
from hfpaged.prefix_tree import FlatTree, flatten
from hfpaged.ranks import path_of_rank
from hfpaged.tensor_file import TensorSpec, write_file

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool


@dataclass(frozen=True)
class SavedPrefixes:
    """What was written: blocks of all layer groups, the tokens they stand for, and the bytes of the file."""

    blocks: int
    tokens: int
    bytes: int


def save_prefixes(pool: KVPool, path: str | os.PathLike[str]) -> SavedPrefixes:
    """See `KVPool.save_prefixes`."""
    check_ranks(pool)
    path = path_of_rank(path, pool.ranks)
    with pool.changing():
        windows = [group.window for group in pool.groups]
        tree, blocks = flatten(pool.prefixes.index, windows, pool.blocks.cached)
        stores = _only_stores(pool) if blocks else {}
        roots = [(width, tuple(key for key in keys if key.kind != "device")) for width, keys in tree.roots]
        layers = {layer: kind_of(store) for layer, store in stores.items()}
        manifest = Manifest(
            pool.block_size, pool.kv_format.title, pool.groups, layers, roots, installed_versions()
        )  # fmt: skip
        trees = tree_tensors(tree)
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in trees.items()]
        specs += layer_specs(manifest, tree, pool.kv_format)
        size = write_file(path, manifest.to_json(), specs, _contents(pool, trees, stores, tree, blocks))
    return SavedPrefixes(len(blocks), num_tokens(tree.order, pool.block_size), size)


def check_ranks(pool: KVPool) -> None:
    """Raises PrefixFileError where a file would hold the heads of one rank only."""
    if pool.is_of_several_ranks:
        raise PrefixFileError(
            "this pool belongs to a batcher whose model several ranks compute together, and holds the keys and values "
            "of this rank's heads only; save and load prefixes with a model that one process computes"
        )


def _contents(
    pool: KVPool, trees: dict[str, Tensor], stores: dict[int, LayerStore], tree: FlatTree, blocks: list[int]
) -> Iterator[Tensor]:
    """All tensors of the file, in the order of their specs; of keys and values only one layer's at a time."""
    yield from trees.values()
    for number, group in enumerate(pool.groups):
        ids = [block for block, place in zip(blocks, tree.order, strict=True) if place.group == number]
        for layer in group.layers:
            for part in PARTS if layer in stores else ():
                tensor = stores[layer].contents(part)
                yield tensor.index_select(0, torch.tensor(ids, dtype=torch.int64, device=tensor.device))


def _only_stores(pool: KVPool) -> dict[int, LayerStore]:
    """The store of each layer that has one. Raises PrefixFileError where a layer has two."""
    for layer, stores in pool.layer_stores.items():
        if len(stores) > 1:
            kinds = " and ".join(str(store.signature) for store in stores)
            raise PrefixFileError(
                f"layer {layer} of this pool holds {len(stores)} kinds of keys (heads, dims, dtypes, device), {kinds}, "
                "and it is not known which block is of which: use one pool for each dtype and device"
            )
    return {layer: stores[0] for layer, stores in sorted(pool.layer_stores.items())}
