from __future__ import annotations

import hashlib
import struct
from array import array

import pytest

from hfpaged.block_hash import ExtraKey, block_hash, root_hash, sha256

MODEL, SALT, ADAPTER = ExtraKey("model", "m"), ExtraKey("salt", "x"), ExtraKey("adapter", "x")


def framed(*texts):
    return b"".join(struct.pack("<q", len(text.encode())) + text.encode() for text in texts)


def test_a_root_is_the_sha256_of_its_sorted_keys_with_their_lengths():
    expected = hashlib.sha256(framed("adapter", "x", "model", "m")).digest()
    assert root_hash([MODEL, ADAPTER]) == root_hash([ADAPTER, MODEL]) == expected


def test_a_block_is_the_sha256_of_its_parent_its_length_and_its_ids_as_64_bit_numbers():
    parent = hashlib.sha256(b"parent").digest()
    ids = [5, 2**40, -1]
    assert block_hash(parent, array("q", ids)) == hashlib.sha256(parent + struct.pack("<4q", 3, *ids)).digest()


def test_the_chain_has_these_digests_for_ever():
    """Saved prefixes are found by them."""
    root = root_hash([MODEL, SALT])
    first = block_hash(root, array("q", range(4)))
    second = block_hash(first, array("q", [100, 200, 300, 400]))
    assert [digest.hex() for digest in (root_hash([]), root, first, second)] == [
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "827d171edcf18b6f0cc2a7946e8655d039cbf5cfa2229da5727bf3393bf026db",
        "6a6998cccb1d9c42f105f5c0516b735052e9660c8ae14de55099b6abf594e757",
        "f11cc31af8fb2907a1b3dfa035aa894a6fd8f2469153f3e9c6d6b582bf96802b",
    ]


def test_equal_blocks_behind_different_parents_differ():
    ids = array("q", [1, 2])
    parents = [root_hash([]), root_hash([MODEL]), block_hash(root_hash([]), ids)]
    assert len({block_hash(parent, ids) for parent in parents}) == 3


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([SALT], [ADAPTER]),
        ([SALT], []),
        ([ExtraKey("salt", "")], []),
        ([ExtraKey("salt", "ab")], [ExtraKey("salta", "b")]),
        ([ExtraKey("salt", "a"), ExtraKey("salt", "b")], [ExtraKey("salt", "a" + "salt" + "b")]),
        ([ExtraKey("salt", "x\0")], [ExtraKey("salt", "x")]),
        ([ExtraKey("salt", "é")], [ExtraKey("salt", "e\u0301")]),
        ([ExtraKey("a", "b"), ExtraKey("c", "d")], [ExtraKey("a", "d"), ExtraKey("c", "b")]),
        ([SALT], [SALT, SALT]),
    ],
)
def test_keys_that_differ_in_anything_have_other_roots(left, right):
    assert root_hash(left) != root_hash(right)


def test_no_two_lists_of_ids_run_into_each_other():
    root = root_hash([])
    blocks = [[1, 2], [1], [2, 1], [1, 2, 0], [0, 1, 2], [], [2**32 + 1, 2], [258], [1 << 8, 1 << 16]]
    assert len({block_hash(root, array("q", ids)) for ids in blocks}) == len(blocks)


def test_another_hash_function_can_be_put_in_its_place():
    seen = []

    def constant(data):
        seen.append(data)
        return b"same"

    assert root_hash([SALT], constant) == block_hash(b"parent", array("q", [1]), constant) == b"same"
    assert seen == [framed("salt", "x"), b"parent" + struct.pack("<qq", 1, 1)]
    assert sha256(b"abc").hex().startswith("ba7816bf8f01cfea")
