from __future__ import annotations

from array import array

from hfpaged.ghosts import Ghosts
from hfpaged.prefix_block import PrefixBlock
from hfpaged.prefix_index import PrefixIndex


def tree_of(*parents):
    """Blocks without memory; block i stands behind block parents[i], None: behind the root."""
    root = PrefixIndex([None], 1).root([])
    blocks = []
    for number, parent in enumerate(parents):
        above = root if parent is None else blocks[parent]
        blocks.append(PrefixBlock(above, bytes([number]), array("q", [number]), 1, number))
        above.children[blocks[-1].digest] = blocks[-1]
    return root, blocks


def test_the_oldest_is_forgotten_first():
    root, blocks = tree_of(None, None, None)
    ghosts = Ghosts(2)
    for block in blocks:
        ghosts.add(block)
    assert ghosts.prune() == [blocks[0]]
    assert list(root.children.values()) == blocks[1:]
    assert len(ghosts) == 2


def test_a_chain_goes_from_its_end_whichever_way_it_came():
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        root, blocks = tree_of(None, 0, 1, 2)
        ghosts = Ghosts(1)
        for number in order:
            ghosts.add(blocks[number])
        assert ghosts.prune() == [blocks[3], blocks[2], blocks[1]]
        assert list(root.children.values()) == blocks[:1]


def test_what_leads_to_blocks_with_memory_stays_until_those_are_gone():
    root, blocks = tree_of(None, 0, 1)
    ghosts = Ghosts(0)
    for block in blocks[:2]:
        ghosts.add(block)
    assert ghosts.prune() == []
    ghosts.add(blocks[2])
    assert ghosts.prune() == [blocks[2], blocks[1], blocks[0]]
    assert (len(ghosts), root.children) == (0, {})


def test_one_that_has_memory_again_or_a_child_is_not_forgotten():
    root, blocks = tree_of(None, None, None)
    ghosts = Ghosts(0)
    ghosts.add(blocks[0])
    ghosts.add(blocks[1])
    ghosts.discard(blocks[0])
    ghosts.has_child(blocks[1])
    ghosts.has_child(root)
    assert ghosts.prune() == []
    assert len(root.children) == 3
