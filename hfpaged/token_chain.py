"""What the tokens of one sequence are: the key under which its blocks are found again."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hfpaged.prefix_block import PrefixBlock, Root


@dataclass
class TokenChain:
    """The token ids of a sequence, and its published blocks in order.

    `items` holds `root.width` numbers for each position: the token id, and for inputs that are more than token ids
    (embeddings, types) the four words of a SHA-256 of what else stands there.
    """

    root: Root
    items: array[int] = field(default_factory=lambda: array("q"))
    blocks: list[PrefixBlock] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.items) // self.root.width

    def block_items(self, index: int, block_size: int) -> array[int]:
        """The numbers of full block `index`."""
        size = block_size * self.root.width
        return self.items[index * size : (index + 1) * size]

    def trim(self, length: int, block_size: int) -> None:
        """Forget all tokens behind the first `length`."""
        del self.items[length * self.root.width :]
        del self.blocks[length // block_size :]

    def fork(self) -> TokenChain:
        return TokenChain(self.root, self.items[:], self.blocks[:])
