"""Which prefixes are being computed right now, so that a request with the same one can wait instead of computing it
twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)


class _Node(Generic[Holder]):
    """One promised block behind those of `parent`. `holders` are those who have it still to compute, first promised
    first; a node without any stays while others stand behind it.
    """

    __slots__ = ("children", "holders", "key", "parent")

    def __init__(self, parent: _Node[Holder] | None = None, key: Hashable = None) -> None:
        self.parent, self.key = parent, key
        self.children: dict[Hashable, _Node[Holder]] = {}
        self.holders: dict[Holder, None] = {}

    def child(self, key: Hashable) -> _Node[Holder]:
        """The node of `key` behind this one, made if there is none."""
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = _Node(self, key)
        return found

    def prune(self) -> None:
        """Forget this node and those above it as far as nobody stands there or behind."""
        node = self
        while node.parent is not None and not node.children and not node.holders:
            del node.parent.children[node.key]
            node = node.parent


@dataclass
class _Promise(Generic[Holder]):
    blocks: list[_Node[Holder]]  # all that were promised, in order
    num_computed: int = 0


class Promises(Generic[Holder]):
    """The prefixes that running requests (`holder`: anything hashable, by which they are told apart) have promised to
    compute and publish.

    The promised blocks of all holders form one tree, so that a question costs a look per block of its own items,
    however many holders there are. Each node knows who has it still to compute:

        root_key -- [1 2 3 4] -- [5 6 7 8] -- [9 9 9 9]    A has computed one of three blocks, B two of three
                     nobody       A      |     A
                                         `--- [0 1 2 3]
                                               B

    A request asks before it promises: who waits holds no promise, so nobody waits in a circle.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._top: _Node[Holder] = _Node()  # above the roots
        self._promises: dict[Holder, _Promise[Holder]] = {}

    def __len__(self) -> int:
        """Holders with something still to compute."""
        return len(self._promises)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._promises

    def promise(self, holder: Holder, root_key: Hashable, items: array[int], until: int) -> None:
        """`holder` will have computed and published the full blocks among the first `until` of its token ids `items`,
        under the root of prefixes `root_key`. Replaces what it promised before.
        """
        self.withdraw(holder)
        node = self._top.child(root_key)
        blocks = []
        for key in self._keys(items, until):
            node = node.child(key)
            node.holders[holder] = None
            blocks.append(node)
        if blocks:
            self._promises[holder] = _Promise(blocks)
        else:
            node.prune()

    def progress(self, holder: Holder, computed: int) -> None:
        """The full blocks among the first `computed` tokens of `holder` are published; the promise ends with the last.
        Nothing for a holder that has promised nothing.
        """
        promise = self._promises.get(holder)
        if promise is None:
            return
        done = computed // self.block_size
        for node in promise.blocks[promise.num_computed : done]:
            del node.holders[holder]
        promise.num_computed = max(promise.num_computed, min(done, len(promise.blocks)))
        if promise.num_computed == len(promise.blocks):
            self.withdraw(holder)

    def withdraw(self, holder: Holder) -> None:
        """`holder` finished, was preempted or aborted: nobody may wait for it any more."""
        promise = self._promises.pop(holder, None)
        if promise is None:
            return
        for node in promise.blocks[promise.num_computed :]:
            del node.holders[holder]
        promise.blocks[-1].prune()

    def blocked_by(self, root_key: Hashable, items: array[int], known: int) -> Holder | None:
        """For whom a request for `items`, of which it can have the first `known` tokens already, should wait.

        That is a holder whose promised full blocks reach further than `known` tokens along `items` and are not all
        computed yet: the one that reaches furthest, of equals the first. None: wait for nobody.
        """
        node = self._top.children.get(root_key)
        waited_for = None
        reach = 0
        for key in self._keys(items, len(items)):
            node = node and node.children.get(key)
            if node is None:
                break
            reach += self.block_size
            if reach > known and node.holders:
                waited_for = node
        return next(iter(waited_for.holders)) if waited_for else None

    def _keys(self, items: array[int], until: int) -> Iterator[bytes]:
        """The full blocks among the first `until` items, as what they are found by."""
        size = self.block_size * items.itemsize
        raw = items.tobytes()
        for end in range(size, min(until, len(items)) * items.itemsize + 1, size):
            yield raw[end - size : end]
