"""Blocks whose contents follow from their tokens, for tests of the prefix store that need no model."""

from __future__ import annotations

from array import array

import torch

from hfpaged.block_hash import ExtraKey, root_hash
from hfpaged.kv_format import resolve_format
from hfpaged.layer_groups import LayerGroup
from hfpaged.prefix_block import Root
from hfpaged.prefix_manifest import LayerKind
from hfpaged.prefix_store_block import Addresses, StoreFacts, specs_of

BLOCK_SIZE = 4
GROUPS = (LayerGroup(None, (0, 2)), LayerGroup(8, (1, 3)))
KEYS = (ExtraKey("model", "ab" * 32), ExtraKey("salt", "cd" * 32), ExtraKey("device", "cpu"))
KIND = LayerKind(2, 6, 4, "float32", "float32")


def facts(**changes):
    own = {"block_size": BLOCK_SIZE, "kv_format": resolve_format("auto"), "groups": GROUPS}
    return StoreFacts(**own | changes)


def root(keys=KEYS, width=1):
    ordered = tuple(sorted((*keys, ExtraKey("width", str(width)))))
    return Root(ordered, width, root_hash(ordered))


def addresses(seed, count, own_facts=None, own_root=None):
    """Those of a chain of `count` blocks."""
    own_facts, own_root = own_facts or facts(), own_root or root()
    size = own_facts.block_size * own_root.width
    blocks = [array("q", range(seed * 10**6 + number, seed * 10**6 + number + size)) for number in range(count)]
    return list(Addresses(own_facts).behind(own_root, blocks))


def layers(group, kind=KIND):
    return tuple((layer, kind) for layer in GROUPS[group].layers)


def contents(address, group, own_facts=None, kind=KIND):
    """Keys and values that no other block has."""
    generator = torch.Generator().manual_seed(int(address.digest[:12], 16) + group)
    specs = specs_of(own_facts or facts(), group, layers(group, kind))
    return [torch.randint(256, (spec.nbytes,), dtype=torch.uint8, generator=generator) for spec in specs]
