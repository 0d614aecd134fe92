"""Who may begin: what is known of his tokens is looked up, what others compute right now is waited for, and the blocks
that he will surely need must be there. Not those of his maximum length: most requests end before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.block_manager import BlockManager
from hfpaged.engine.block_needs import BlockNeeds
from hfpaged.engine.prefix_wait import Promises
from hfpaged.engine.request import SequenceGroup, SequenceState
from hfpaged.prefix_block import Root
from hfpaged.prefix_cache import PrefixCache
from hfpaged.prefix_index import Match


class Admitter:
    """Gives groups their first blocks. `watermark`: the share of the pool that is left free for those who run."""

    def __init__(self, manager: BlockManager, prefixes: PrefixCache, needs: BlockNeeds, watermark: float) -> None:
        self.promises: Promises[SequenceGroup] = Promises(manager.block_size)
        self._manager, self._pool, self._prefixes, self._needs = manager, manager.pool, prefixes, needs
        self._watermark = watermark

    def match(self, group: SequenceGroup) -> Match:
        """What is known of the tokens of a group, of beams of the first one's. Who wants to see the logits of his
        prompt has them computed.
        """
        root, seq = group.request.root, group.sequences[0]
        return Match() if root is None or group.request.wants_prompt_logits else self._longest(root, seq)

    def awaited(self, group: SequenceGroup, match: Match) -> SequenceGroup | None:
        """Who is computing, right now, a longer prefix of this group than is known, and of use to it."""
        if group.request.root is None or group.request.wants_prompt_logits or not len(self.promises):
            return None
        root, tokens = group.request.root, group.sequences[0].tokens
        known = match.length(self._manager.block_size)
        holder = self.promises.blocked_by(root.digest, tokens[:-1], known)
        if holder is not None and self._prefixes.lower is not None:  # what comes back is sooner there
            known = self._prefixes.reach(root, tokens, len(tokens) - 1, match)
            holder = self.promises.blocked_by(root.digest, tokens[:-1], known)
        return holder

    def is_coming(self, group: SequenceGroup, match: Match) -> bool:
        """Whether blocks of this group are being read, and worth waiting for."""
        return is_coming(self._prefixes, group, match)

    def needs(self, group: SequenceGroup, match: Match) -> int:
        """Free blocks that a group takes until all that it has is computed, and one token more. Those of `match` that
        somebody holds already are not taken from the free ones.
        """
        needed = sum(self._needs.still(seq, 1) for seq in group.sequences)
        needed += (group.seats - len(group.sequences)) * self._needs.num_tables  # the first block that forks write
        blocks = (block for entry in match.blocks for block in entry.blocks)
        in_use = sum(block >= 0 and self._pool.refcount(block) > 0 for block in blocks)
        return max(needed - in_use, 0) + (match.partial is not None)

    def reserved(self, running: Iterable[SequenceGroup]) -> int:
        """Blocks that are not there for a new group: those that running ones will surely take, and the watermark."""
        watermark = max(int(self._pool.num_blocks * self._watermark), 1)
        return watermark + sum(map(self.still, running))

    def still(self, group: SequenceGroup) -> int:
        """Blocks that a running group will take until all that it has is computed."""
        return sum(self._needs.still(seq) for seq in group.sequences)

    def begin(self, seq: SequenceState, match: Match | None = None) -> Match:
        """Give a sequence its tables, with the blocks of `match`, or of what is known now, and of what has come back
        from below the pool; what was known then.
        """
        root, wants_nothing = seq.request.root, match is not None and seq.request.wants_prompt_logits
        seq.blocks = self._manager.create()
        if root is None:
            return Match()
        limit = 0 if wants_nothing else len(seq.tokens) - 1
        with self._prefixes.fetched(root, seq.tokens, limit, match) as found:
            self._prefixes.attach(seq.blocks, root, seq.tokens, found)
        return found

    def promise(self, group: SequenceGroup) -> None:
        """Others may wait for what this group is about to compute."""
        root, seq = group.request.root, group.sequences[0]
        if root is not None:
            self.promises.promise(group, root.digest, seq.tokens, len(seq.tokens))
            self.promises.progress(group, seq.num_computed)

    def _longest(self, root: Root, seq: SequenceState) -> Match:
        return self._prefixes.longest(root, seq.tokens, len(seq.tokens) - 1)


def is_coming(prefixes: PrefixCache, group: SequenceGroup, match: Match | None = None) -> bool:
    """Whether more of the first sequence of a group than `match`, or what is known now, is being read."""
    root, tokens = group.request.root, group.sequences[0].tokens
    if root is None or group.request.wants_prompt_logits or prefixes.lower is None:
        return False
    limit = len(tokens) - 1
    return prefixes.is_coming(root, tokens, limit, prefixes.longest(root, tokens, limit) if match is None else match)
