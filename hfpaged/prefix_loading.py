"""Reading saved prefixes into a pool. Everything is checked before the pool changes; nothing is ever unpickled."""

from __future__ import annotations

import os
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfpaged.block_hash import ExtraKey
from hfpaged.block_table import GONE
from hfpaged.errors import PrefixFileError
from hfpaged.fingerprint import model_keys
from hfpaged.kv_storage import LayerStore
from hfpaged.prefix_block import PrefixBlock
from hfpaged.prefix_manifest import (
    PARTS,
    Manifest,
    describe,
    installed_versions,
    kind_of,
    layer_specs,
    num_tokens,
    parse_manifest,
    read_tree,
)
from hfpaged.prefix_saving import check_ranks
from hfpaged.prefix_stores import stores_for
from hfpaged.prefix_tree import FlatTree, Place, choose, known_entries, publish_chosen
from hfpaged.ranks import path_of_rank
from hfpaged.tensor_file import open_file, spec_of

if TYPE_CHECKING:
    from hfpaged.kv_pool import KVPool

Keys = tuple[ExtraKey, ...]


@dataclass(frozen=True)
class LoadedPrefixes:
    """What became of the blocks of a file: `blocks` were loaded, for `tokens` tokens; `known` were published already;
    for `left_out` there was no room; `other_models` are of models that have no cache on this pool.
    """

    blocks: int
    tokens: int
    known: int
    left_out: int
    other_models: int


def load_prefixes(pool: KVPool, path: str | os.PathLike[str]) -> LoadedPrefixes:
    """See `KVPool.load_prefixes`."""
    check_ranks(pool)
    path = path_of_rank(path, pool.ranks)
    with open_file(path) as file:
        manifest, tree = _read(file, path)
        _check_pool(pool, manifest, path)
        _check_rank(pool, manifest, path)
        _check_tensors(pool, manifest, tree, file, path)
        keys, model = _own_roots(pool, manifest, path) if tree.order else ([], None)
        stores = stores_for(pool, manifest.layers, model, repr(path)) if tree.order else {}
        with pool.changing():
            return _take(pool, tree, keys, stores, file)


def _read(file: Any, path: str) -> tuple[Manifest, FlatTree]:
    try:
        manifest = parse_manifest(file.metadata()["manifest"])
        trees = {name: file.get_tensor(name) for name in file.keys() if name.startswith("tree.")}  # noqa: SIM118
        return manifest, read_tree(manifest, trees)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PrefixFileError(f"{path!r} cannot be understood: {error}; save the prefixes again") from error


def _check_pool(pool: KVPool, manifest: Manifest, path: str) -> None:
    """Raises PrefixFileError where the file's blocks are not of the pool's kind."""
    for what, saved, own in (
        ("a block size", manifest.block_size, pool.block_size),
        ("the KV format", manifest.kv_format, pool.kv_format.title),
        ("the layer groups", describe(manifest.groups), describe(pool.groups)),
    ):
        if saved != own:
            raise PrefixFileError(
                f"{path!r} was saved from a pool with {what} of {saved}, this one has {own}: blocks fit only into a "
                "pool of the same kind; make one, or save prefixes from a pool like this"
            )


def _check_rank(pool: KVPool, manifest: Manifest, path: str) -> None:
    """Raises PrefixFileError where the file has the heads of another rank, or of a whole model."""
    saved = {key.value for _, keys in manifest.roots for key in keys if key.kind == "rank"} or {str(None)}
    if manifest.roots and saved != {own := str(pool.ranks)}:
        kinds = [" and ".join(sorted(saved)), own]
        by, now = ("one process" if kind == str(None) else kind for kind in kinds)
        raise PrefixFileError(
            f"{path!r} was saved by {by}, and this is {now}: ranks have different heads; load what this rank saved "
            "with as many ranks as now"
        )


def _check_tensors(pool: KVPool, manifest: Manifest, tree: FlatTree, file: Any, path: str) -> None:
    """Raises PrefixFileError unless the tensors are there, as the manifest and the pool's stores want them."""
    for spec in layer_specs(manifest, tree, pool.kv_format):
        found = spec_of(file, spec.name)
        if found != spec:
            raise PrefixFileError(f"{path!r} has {found} in the place of {spec}; save the prefixes again")
    for layer, kind in manifest.layers.items():
        for store in pool.layer_stores.get(layer, ()):
            own = kind_of(store)
            if (own.heads, own.key_dim, own.value_dim) != (kind.heads, kind.key_dim, kind.value_dim):
                raise PrefixFileError(f"{path!r} has {kind} for layer {layer}, this pool {own}: it is of another model")


def _own_roots(pool: KVPool, manifest: Manifest, path: str) -> tuple[list[Keys | None], Any]:
    """(the extra keys of each root under which a model of this pool will look, None for roots of other models; that
    model). Raises PrefixFileError where all are of other models.
    """
    with pool.changing():
        models = list(pool.models)
    if not models:
        raise PrefixFileError(
            f"{path!r} may be of any model: this pool was made from a config, or its model is gone, so "
            "it knows 0 models whose weights the keys could be of; load into the pool of a PagedCache(model)"
        )
    own = {fingerprint: (devices, model) for model in models for fingerprint, *devices in [model_keys(model)]}
    found = [(key, keys) for _, keys in manifest.roots for key in keys if key.kind == "model"]
    matching = [key for key, _ in found if key in own]
    if not matching:
        raise PrefixFileError(_other_model(manifest, [key.value for key, _ in found], [key.value for key in own], path))
    devices, model = own[matching[-1]]
    keys = [(*keys, *devices) if own.keys() & set(keys) else None for _, keys in manifest.roots]
    return keys, model


def _other_model(manifest: Manifest, saved: list[str], own: list[str], path: str) -> str:
    now = installed_versions()
    others = [f"{name} {number} (now {now[name]})" for name, number in manifest.versions.items() if now[name] != number]
    hint = f"; it was written with {', '.join(others)}, which may build another config" if others else ""
    return (
        f"{path!r} was saved with model fingerprint {_short(saved)}, this pool's model has {_short(own)}: weights, "
        f"code, dtypes or config differ{hint}. Keys of another model would give wrong tokens; save prefixes from this "
        "one"
    )


def _short(fingerprints: list[str]) -> str:
    return " and ".join(f"{fingerprint[:12]}..." for fingerprint in dict.fromkeys(fingerprints))


def _take(
    pool: KVPool, tree: FlatTree, keys: Many[Keys | None], stores: dict[int, LayerStore], file: Any
) -> LoadedPrefixes:
    index, windows = pool.prefixes.index, [group.window for group in pool.groups]
    roots = [None if own is None else index.root(own, width) for own, (width, _) in zip(keys, tree.roots, strict=False)]
    entries = known_entries(tree, roots, index)
    known = {p for p in tree.order if (entry := entries[p.node]) is not None and entry.blocks[p.group] != GONE}
    chosen = choose(tree, windows, known, roots, pool.blocks.num_unused)
    placed = dict(zip(chosen, pool.blocks.allocate(len(chosen)), strict=True))
    try:
        if pool.swapping:
            pool.swapping.flush()  # what was evicted and not copied yet may lie in these blocks
        _fill(pool, tree, placed, stores, file)
    except BaseException:
        for block in placed.values():
            pool.blocks.release(block)
        raise
    published = publish_chosen(tree, roots, index, placed, len(windows))
    _let_go(pool, tree, placed, known, published, entries)
    others = sum(roots[tree.root_of[place.node]] is None for place in tree.order)
    left_out = len(tree.order) - len(placed) - len(known) - others
    return LoadedPrefixes(len(placed), num_tokens(placed, pool.block_size), len(known), left_out, others)


def _fill(
    pool: KVPool, tree: FlatTree, placed: dict[Place, int], stores: dict[int, LayerStore], file: Any
) -> None:  # fmt: skip
    """Copy keys and values into the blocks, one layer at a time."""
    for number, group in enumerate(pool.groups):
        rows = tree.rows(number)
        own = [place for place in placed if place.group == number]
        for layer in group.layers if own else ():
            if layer in stores:
                stores[layer].reserve(pool.blocks.high_water, pool.num_blocks)
                for part in PARTS:
                    contents = file.get_tensor(f"layer.{layer}.{part}")[[rows[place] for place in own]]
                    stores[layer].fill(part, [placed[place] for place in own], contents)


def _let_go(
    pool: KVPool, tree: FlatTree, placed: dict[Place, int], known: set[Place],
    published: list[PrefixBlock | None], entries: list[PrefixBlock | None],
) -> None:  # fmt: skip
    """Leave the blocks cached in the order in which they were used. What was known already is used anew, so that no
    end of a prefix stays longer than its beginning.
    """
    for place in tree.order:
        entry = published[place.node] or entries[place.node]
        block = placed.get(place, GONE)
        if place in known and entry is not None:
            pool.blocks.acquire(block := entry.blocks[place.group])
        elif entry is not None and block != GONE and entry.blocks[place.group] == block:
            pool.blocks.publish(block)
        if block != GONE:
            pool.blocks.release(block)
