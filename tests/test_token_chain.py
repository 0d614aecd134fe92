from __future__ import annotations

from array import array

import pytest

from hfpaged.prefix_index import PrefixIndex
from hfpaged.token_chain import TokenChain


def chain_of(length, width=1, block_size=4):
    """Position p has the numbers 10 p, 10 p + 1, ...; its full blocks are published."""
    index = PrefixIndex([None], block_size)
    chain = TokenChain(index.root([], width), array("q", [10 * p + i for p in range(length) for i in range(width)]))
    for number in range(length // block_size):
        parent = chain.blocks[-1] if chain.blocks else chain.root
        chain.blocks.append(index.publish(parent, chain.block_items(number, block_size), [number]))
    return chain


@pytest.mark.parametrize("width", [1, 5])
def test_a_chain_counts_tokens_whatever_the_numbers_of_each(width):
    chain = chain_of(10, width)
    assert chain.length == 10
    assert chain.block_items(1, 4) == array("q", [10 * p + i for p in range(4, 8) for i in range(width)])
    assert len(chain.blocks) == 2


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2), (10, 2), (99, 2)])
def test_trim_keeps_full_blocks_only(length, blocks, width):
    chain = chain_of(10, width)
    kept = chain.items[: length * width]
    chain.trim(length, 4)
    assert chain.length == min(length, 10)
    assert (chain.items, len(chain.blocks)) == (kept, blocks)


def test_a_fork_goes_on_by_itself():
    chain = chain_of(8)
    child = chain.fork()
    child.items.append(1)
    child.trim(4, 4)
    assert (chain.length, len(chain.blocks)) == (8, 2)
    assert child.root is chain.root
    assert child.blocks == chain.blocks[:1]
