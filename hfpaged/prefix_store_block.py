"""One block of a chain as a file of saved prefixes: its name says what is in it, and what is in it is compared."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hfpaged.block_hash import ExtraKey, block_hash, root_hash
from hfpaged.errors import PrefixFileError
from hfpaged.kv_format import KVFormat
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_block import PrefixBlock, Root
from hfpaged.prefix_manifest import (
    FORMAT,
    LayerKind,
    Manifest,
    describe,
    installed_versions,
    layer_specs,
    parse_manifest,
    read_tree,
    tree_tensors,
)
from hfpaged.prefix_tree import FlatTree, Place
from hfpaged.tensor_file import TensorSpec

# Keys of a root that say where in this process something lies or hangs: blocks under a hook are never stored, those of
# one device serve another one.
_DEVICE, _HOOK = "device", "hook"
_KNOWN_LINKS, _KNOWN_ADDRESSES = 2**16, 2**13

Layers = tuple[tuple[int, LayerKind], ...]  # those of one layer group


@dataclass(frozen=True)
class StoreFacts:
    """What decides about the bytes of a block besides its root, its tokens and the kinds of its layers."""

    block_size: int
    kv_format: KVFormat
    groups: tuple[LayerGroup, ...]

    @property
    def keys(self) -> tuple[ExtraKey, ...]:
        """The same as extra keys."""
        return (
            ExtraKey("file format", str(FORMAT)),
            ExtraKey("block size", str(self.block_size)),
            ExtraKey("KV format", self.kv_format.title),
            ExtraKey("layer groups", describe(self.groups)),
            # A model of the same weights may compute other numbers with other versions, and a store outlives them.
            *(ExtraKey("version", f"{name} {number}") for name, number in installed_versions().items()),
        )


@dataclass(frozen=True)
class BlockAddress:
    """A block by what is in it: `digest` follows from the facts of its store, the `keys` and the `width` of its root,
    and all tokens up to its end. `number` counts the blocks before it.
    """

    digest: str
    keys: tuple[ExtraKey, ...]
    width: int
    items: array[int]
    number: int

    def tree(self, group: int) -> FlatTree:
        """That of its file. It begins behind a root of its own, which nobody who loads saved prefixes looks for."""
        keys = (*self.keys, ExtraKey("block", self.digest))
        return FlatTree([(self.width, keys)], [0], [-1], [self.items], [Place(0, group)])

    def name(self, group: int) -> str:
        """Of the file of what a layer group keeps of it."""
        return f"{self.digest}-{group}"


class _Link(NamedTuple):
    digest: bytes
    length: int  # blocks up to here


class Addresses:
    """Which files hold the blocks of a pool, for blocks that are known and for those that may follow."""

    def __init__(self, facts: StoreFacts) -> None:
        self._keys = facts.keys
        self._links: dict[bytes, _Link] = {}  # by the digest of a root or block
        self._addresses: dict[bytes, BlockAddress] = {}  # by the digest of a block

    def behind(self, parent: PrefixBlock | Root, blocks: Iterable[array[int]]) -> Iterator[BlockAddress]:
        """Of blocks with these items that follow `parent`. None for a root whose blocks cannot be stored."""
        root = parent if isinstance(parent, Root) else parent.root
        if root.value(_HOOK) is not None:
            return
        keys, (digest, length) = _shared_keys(root), self._link(parent)
        for number, items in enumerate(blocks, start=length):
            digest = block_hash(digest, items)
            yield BlockAddress(digest.hex(), keys, root.width, items, number)

    def of(self, entry: PrefixBlock) -> BlockAddress | None:
        """That of a block, None for one that cannot be stored. A block is asked for several times in a row: whether it
        is there, what it takes, what is in it.
        """
        found = self._addresses.get(entry.digest)
        if found is None or found.items != entry.items:
            found = next(self.behind(entry.parent, [entry.items]), None)
            if len(self._addresses) > _KNOWN_ADDRESSES:
                self._addresses.clear()
            if found is not None:
                self._addresses[entry.digest] = found
        return found

    def _link(self, node: PrefixBlock | Root) -> _Link:
        """The chain of blocks up to this node, hashed as its own digest is, without the device and with the facts."""
        if len(self._links) > _KNOWN_LINKS:
            self._links.clear()
        above: list[PrefixBlock] = []
        while (link := self._links.get(node.digest)) is None and isinstance(node, PrefixBlock):
            above.append(node)
            node = node.parent
        if link is None:
            assert isinstance(node, Root)
            keys = (*_shared_keys(node), ExtraKey("width", str(node.width)), *self._keys)
            link = self._links[node.digest] = _Link(root_hash(keys), 0)
        for entry in reversed(above):
            link = self._links[entry.digest] = _Link(block_hash(link.digest, entry.items), link.length + 1)
        return link


def _shared_keys(root: Root) -> tuple[ExtraKey, ...]:
    return tuple(key for key in root.keys if key.kind not in (_DEVICE, "width"))


class BlockFile(NamedTuple):
    """What a file says about its block."""

    manifest: str
    specs: list[TensorSpec]
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """About the size of the file."""
        return len(self.manifest) + sum(spec.nbytes + 128 for spec in self.specs)


def block_file(
    facts: StoreFacts, address: BlockAddress, group: int, layers: Layers, parts: Many[Tensor]
) -> BlockFile:  # fmt: skip
    """What to write for `parts`, uint8 [bytes] each: the keys and values of the layers of a group, in the order of
    `specs_of`.
    """
    tree = address.tree(group)
    own = specs_of(facts, group, layers)
    tensors = [part.view(spec.dtype).view(spec.shape) for part, spec in zip(parts, own, strict=True)]
    trees = tree_tensors(tree)
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in trees.items()]
    return BlockFile(_manifest(facts, tree, layers).to_json(), [*specs, *own], [*trees.values(), *tensors])


def read_block(
    facts: StoreFacts, address: BlockAddress, group: int, manifest: str, tensors: Mapping[str, Tensor]
) -> tuple[Layers, list[Tensor]]:
    """(layer kinds, their keys and values as `block_file` takes them) of the file of a block. Raises PrefixFileError
    where it holds any other one: of another format, root or beginning, or other tokens.
    """
    try:
        found = parse_manifest(manifest)
        layers, tree = tuple(found.layers.items()), address.tree(group)
        if (replace(found, versions={}), read_tree(found, tensors)) != (_manifest(facts, tree, layers, {}), tree):
            raise ValueError("it holds another block than its name says")
        parts = []
        for name, dtype, shape in specs_of(facts, group, layers):
            if (tensors[name].dtype, tuple(tensors[name].shape)) != (dtype, shape):
                raise ValueError(f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, not {dtype} {shape}")
            parts.append(tensors[name].flatten().view(torch.uint8))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PrefixFileError(f"the file {address.name(group)} cannot be understood: {error}") from error
    return layers, parts


@lru_cache
def specs_of(facts: StoreFacts, group: int, layers: Layers) -> tuple[TensorSpec, ...]:
    """The keys and values of a block: "layer.3.key", "layer.3.value" and so on."""
    tree = FlatTree([], [0], [-1], [], [Place(0, group)])
    specs = layer_specs(_manifest(facts, tree, layers), tree, facts.kv_format)
    return tuple(spec for spec in specs if spec.shape[0])


def _manifest(
    facts: StoreFacts, tree: FlatTree, layers: Layers, versions: Mapping[str, str] | None = None
) -> Manifest:  # fmt: skip
    versions = _versions() if versions is None else versions
    return Manifest(facts.block_size, facts.kv_format.title, facts.groups, dict(layers), tree.roots, dict(versions))


@lru_cache
def _versions() -> dict[str, str]:
    return installed_versions()
