from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from hfpaged.block_hash import ExtraKey
from hfpaged.content import read_content
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import LayerGroup
from hfpaged.row_tokens import RowTokens

SIZE = 4


class Batch:
    """Rows whose steps are announced, without keys."""

    def __init__(self, publishes=True, width=1, rows=2):
        groups = (LayerGroup(None, (0,)),)
        self.pool = KVPool(groups, block_size=SIZE, kv_format=FORMATS["auto"], num_blocks=64)
        self.tokens = RowTokens(self.pool, publishes)
        self.tokens.root = self.pool.prefixes.index.root([ExtraKey("model", "m")], width)
        with self.pool.changing() as manager:
            self.sequences = [manager.create() for _ in range(rows)]
        self.length = 0

    def begin(self, ids, kept=None, positions=None, grows=True, **more):
        """A step that is under way; `positions` None: they count on from what each row has."""
        ids = torch.tensor(ids)
        kept = np.ones(ids.shape, dtype=bool) if kept is None else np.array(kept, dtype=bool)
        if positions is None:
            past = torch.tensor([[sequence.length] for sequence in self.sequences])
            positions = (past + torch.from_numpy(kept).cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "position_ids": positions, **more}
        self.tokens.announce(read_content({name: given for name, given in inputs.items() if given is not False}))
        self.length += ids.shape[1]
        with self.pool.changing() as manager:
            manager.grow(list(zip(self.sequences, kept.sum(axis=1).tolist(), strict=True)))
        self.tokens.step_begins(self.sequences, self.length, ids.shape[1], None if kept.all() else kept)

    def step(self, ids, kept=None, **more):
        self.begin(ids, kept, **more)
        self.tokens.step_completed()

    def settle(self):
        with self.pool.changing() as manager:
            self.tokens.settle(manager, self.sequences)
        self.pool.check_integrity()

    @property
    def chains(self):
        return [None if sequence.chain is None else sequence.chain.items.tolist() for sequence in self.sequences]


def test_rows_learn_their_tokens_without_padding_and_publish_full_blocks():
    batch = Batch()
    batch.step([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]], [[0, 0, 1, 1, 1], [1] * 5])
    assert batch.chains == [[], []]  # not read yet
    batch.step([[9], [10]])
    batch.settle()
    assert batch.chains == [[1, 2, 3, 9], [4, 5, 6, 7, 8, 10]]
    assert batch.pool.prefixes.index.num_blocks == 2


def test_rows_are_due_once_they_may_have_filled_a_block():
    batch = Batch()
    due = []
    for number in range(9):
        assert batch.tokens.is_due_after(1) == (number % SIZE == SIZE - 1)
        batch.step([[number], [number + 20]])
        due.append(batch.tokens.is_due)
        if due[-1]:
            batch.settle()
    assert due == [number % SIZE == SIZE - 1 for number in range(9)]


def test_without_publishing_tokens_are_known_and_nothing_is_found():
    batch = Batch(publishes=False)
    batch.step([[1, 2, 3, 4, 5]] * 2)
    batch.settle()
    assert batch.chains == [[1, 2, 3, 4, 5]] * 2
    assert batch.pool.prefixes.index.num_blocks == 0
    assert not batch.tokens.fork().publishes


def test_a_step_that_is_undone_was_never_there():
    batch = Batch()
    batch.step([[1, 2, 3], [4, 5, 6]])
    batch.begin([[7], [8]])
    batch.tokens.step_undone()
    batch.length -= 1
    with batch.pool.changing() as manager:
        for sequence in batch.sequences:
            manager.trim(sequence, 3)
    batch.step([[9, 10], [11, 12]])
    batch.settle()
    assert batch.chains == [[1, 2, 3, 9, 10], [4, 5, 6, 11, 12]]


def test_rows_that_are_changed_in_the_middle_of_a_step_are_known_no_longer():
    batch = Batch()
    batch.step([[1, 2, 3, 4]] * 2)
    batch.settle()
    batch.begin([[5, 6, 7, 8]] * 2)
    batch.settle()
    assert (batch.chains, batch.tokens.root) == ([None, None], None)
    assert batch.pool.prefixes.index.num_blocks == 1


def announce_what_fails(tokens):
    tokens.announce(read_content({"input_ids": torch.ones(2, 1, dtype=torch.long)}))
    tokens.step_undone()


@pytest.mark.parametrize(
    "announce",
    [
        lambda batch: batch.tokens.announce(None),
        lambda batch: None,  # by a model without hooks
        lambda batch: batch.tokens.announce(read_content({"input_ids": torch.ones(2, 2, dtype=torch.long)})),
        lambda batch: batch.tokens.announce(read_content({"input_ids": torch.ones(2, 1).long(), "flag": True})),
        lambda batch: (
            batch.tokens.announce(read_content({"input_ids": torch.ones(2, 1)})),
            batch.tokens.step_undone(),
        ),
    ],
    ids=["not understood", "not announced", "another shape", "other arguments", "announced and failed"],
)
def test_a_step_of_which_nobody_knows_the_tokens_ends_what_is_known(announce):
    batch = Batch()
    batch.step([[1, 2, 3, 4]] * 2)
    batch.settle()
    announce(batch)
    with batch.pool.changing() as manager:
        manager.grow([(sequence, 1) for sequence in batch.sequences])
    batch.tokens.step_begins(batch.sequences, 5, 1, None)
    assert (batch.chains, batch.tokens.root) == ([None, None], None)
    batch.tokens.step_completed()
    batch.step([[1], [2]])
    batch.settle()
    assert batch.chains == [None, None]


def test_positions_that_do_not_count_on_end_what_plain_prompts_may_find():
    batch = Batch()
    batch.step([[1, 2, 3, 4]] * 2)
    batch.settle()
    batch.step([[5], [6]], positions=torch.tensor([[4], [9]]))
    batch.settle()
    assert batch.tokens.root is None
    wide = Batch(width=5)
    wide.step([[1, 2, 3, 4]] * 2)
    wide.step([[5], [6]], positions=torch.tensor([[4], [9]]))
    wide.settle()
    assert [chain[20] for chain in wide.chains] == [5, 6]
    assert [chain[21:] == [0] * 4 for chain in wide.chains] == [True, False]


@pytest.mark.parametrize("width", [1, 5])
def test_a_model_that_counts_by_itself_counts_padding_in(width):
    batch = Batch(width=width)
    batch.step([[1, 2], [3, 4]], positions=False)
    batch.settle()
    assert batch.tokens.root is not None
    padded = Batch(width=width)
    padded.step([[0, 2], [3, 4]], [[0, 1], [1, 1]])
    padded.step([[5], [6]], positions=False)
    assert padded.tokens.root is None


def test_tensors_that_are_filled_anew_do_not_change_what_was_announced():
    batch = Batch(rows=1)
    buffer = torch.zeros(1, 1, dtype=torch.long)
    for token in (3, 4, 5):
        buffer.fill_(token)
        batch.tokens.announce(read_content({"input_ids": buffer}))
        batch.length += 1
        with batch.pool.changing() as manager:
            manager.grow([(batch.sequences[0], 1)])
        batch.tokens.step_begins(batch.sequences, batch.length, 1, None)
        batch.tokens.step_completed()
    batch.settle()
    assert batch.sequences[0].chain.items == array("q", [3, 4, 5])


def test_a_fork_knows_under_what_its_tokens_are_found():
    batch = Batch()
    child = batch.tokens.fork()
    assert (child.root, child.publishes, child.is_due) == (batch.tokens.root, True, False)
