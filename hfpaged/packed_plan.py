"""What one forward of a packed step takes beside weights and blocks, as numbers: by it another process, which holds
other heads of the same model, computes the same step.

It is the whole step each time, no difference to the one before: whoever follows keeps nothing that could go astray.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from hfpaged.block_table import BlockCopy, Blocks, BlockTable
from hfpaged.filling import Filling
from hfpaged.step import Step

Ints = npt.NDArray[np.int64]
NOTHING: Ints = np.empty(0, dtype=np.int64)
_FILLING = fields(Filling)


@dataclass(frozen=True)
class PackedInput:
    """What a model is given of sequences side by side.

    token_ids  [num_tokens] int64
    starts     [num_seqs] int64, the position of the first token of each
    counts     [num_seqs] int64, how many tokens each brings
    wanted     [num_wanted] int64, the tokens whose logits are wanted
    """

    token_ids: Ints
    starts: Ints
    counts: Ints
    wanted: Ints

    @property
    def positions(self) -> Ints:
        """[num_tokens] int64, within its sequence."""
        if len(self.counts) == len(self.token_ids):  # a step that only decodes
            return self.starts
        firsts = np.cumsum(self.counts) - self.counts
        return np.arange(len(self.token_ids)) + np.repeat(self.starts - firsts, self.counts)


@dataclass(frozen=True)
class GroupPlan:
    """One layer group of a step.

    contexts    [num_seqs] int64, the tokens in the blocks that each sequence holds
    num_blocks  [num_seqs] int64, how many blocks that are
    blocks      int32, the blocks of all sequences, one table behind the other
    copies      [n, 4] int64, copies-on-write: block and target, their residuals or -1
    residuals   [num_seqs] int64 in a format with residuals, else nothing; `filling` as in a Step, or nothing
    """

    contexts: Ints
    num_blocks: Ints
    blocks: npt.NDArray[np.int32]
    copies: Ints = field(default_factory=lambda: NOTHING.reshape(0, 4))
    residuals: Ints = field(default_factory=lambda: NOTHING)
    filling: tuple[Ints, ...] = ()

    def tables(self, pool: Blocks, block_size: int) -> list[BlockTable]:
        """As they stand in the process that leads, to be read and nothing else: `pool` counts none of their blocks."""
        ends = np.cumsum(self.num_blocks).tolist()
        found = []
        for end, count, context in zip(ends, self.num_blocks.tolist(), self.contexts.tolist(), strict=True):
            table = BlockTable(pool, block_size)
            table.blocks.frombytes(self.blocks[end - count : end].tobytes())
            table.length = context
            found.append(table)
        return found

    @property
    def copies_on_write(self) -> list[BlockCopy]:
        return [
            BlockCopy(source, target, None if old < 0 else (old, new))
            for source, target, old, new in self.copies.tolist()
        ]

    def with_filling(self, step: Step, block_size: int) -> Step:
        """The step with what it does to residuals."""
        if not self.filling:
            return step
        parts = [torch.from_numpy(part.copy()) for part in self.filling]
        reopened, slots, filled, filled_rows, whole, whole_rows = parts
        filling = Filling(
            reopened.reshape(-1, 2), slots, filled, filled_rows.reshape(-1, block_size), whole,
            whole_rows.reshape(-1, block_size),
        )  # fmt: skip
        return replace(step, residuals=torch.from_numpy(self.residuals.astype(np.int32)), filling=filling)


@dataclass(frozen=True)
class PackedPlan:
    """A whole step. `length`: the positions that the model is told of. `num_blocks`, `num_residuals`: how many of them
    stores must have by now.
    """

    given: PackedInput
    groups: tuple[GroupPlan, ...]
    length: int
    num_blocks: int
    num_residuals: int = 0

    def numbers(self) -> Ints:
        """int64: length, num_blocks, num_residuals, how many parts, the length of each, and the parts themselves."""
        parts = [*(getattr(self.given, each.name) for each in fields(PackedInput))]
        for group in self.groups:
            parts += [group.contexts, group.num_blocks, _halves(group.blocks), group.copies.reshape(-1)]
            parts += [group.residuals, *(part.reshape(-1) for part in group.filling or [NOTHING] * len(_FILLING))]
        head = [self.length, self.num_blocks, self.num_residuals, len(parts), *map(len, parts)]
        return np.concatenate([np.array(head, dtype=np.int64), *parts])

    @classmethod
    def of(cls, numbers: Ints) -> PackedPlan:
        """The plan of `numbers`."""
        length, num_blocks, num_residuals, count = numbers[:4].tolist()
        ends = np.cumsum(numbers[4 : 4 + count])
        parts = iter(np.split(numbers[4 + count :], ends[:-1]))
        given = PackedInput(*(next(parts) for _ in fields(PackedInput)))
        per_group = 5 + len(_FILLING)
        num_groups = (count - len(fields(PackedInput))) // per_group
        groups = tuple(_group([next(parts) for _ in range(per_group)]) for _ in range(num_groups))
        return cls(given, groups, length, num_blocks, num_residuals)


def group_plan(tables: Many[BlockTable], copies: Iterable[BlockCopy], step: Step) -> GroupPlan:
    """What `step` reads, of one layer group."""
    blocks = b"".join([table.blocks.tobytes() for table in tables])
    rows = [(copy.source, copy.target, *(copy.residuals or (-1, -1))) for copy in copies]
    filling, where = step.filling, step.residuals
    return GroupPlan(
        step.context_lengths.numpy().astype(np.int64),
        np.array([len(table.blocks) for table in tables], dtype=np.int64),
        np.frombuffer(blocks, dtype=np.int32),
        np.array(rows, dtype=np.int64).reshape(-1, 4),
        NOTHING if where is None else where.numpy().astype(np.int64),
        () if filling is None else tuple(getattr(filling, part.name).numpy() for part in _FILLING),
    )


def _group(parts: list[Ints]) -> GroupPlan:
    contexts, num_blocks, halves, copies, residuals, *filling = parts
    blocks = halves.view(np.int32)[: int(num_blocks.sum())]
    has_filling = len(residuals) > 0
    return GroupPlan(
        contexts, num_blocks, blocks, copies.reshape(-1, 4), residuals, tuple(filling) if has_filling else ()
    )


def _halves(numbers: npt.NDArray[np.int32]) -> Ints:
    """Two in each int64."""
    return np.concatenate([numbers, np.zeros(len(numbers) % 2, dtype=np.int32)]).view(np.int64)
