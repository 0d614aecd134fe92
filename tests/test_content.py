from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from hfpaged.content import WIDE, has_plain_positions, one_prompt, read_content, row_items
from hfpaged.errors import InvalidConfigError

IDS = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
KEPT = np.array([[False, False, True, True], [True] * 4])
POSITIONS = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])


def items(inputs, row=0, kept=KEPT, past=0, width=WIDE):
    return row_items(read_content(inputs), row, kept, past, width).tolist()


def test_plain_prompts_are_their_kept_token_ids():
    content = read_content({"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": None, "use_cache": True})
    assert (content.shape, content.width, content.keys, content.by_position) == ((2, 4), 1, (), {})
    assert row_items(content, 0, KEPT, 0, 1).tolist() == [5, 6]
    assert row_items(content, 1, KEPT, 0, 1).tolist() == [7, 8, 9, 10]
    assert row_items(content, 1, None, 0, 1).tolist() == [7, 8, 9, 10]
    assert items({"input_ids": IDS.int()}, width=1) == [5, 6]


@pytest.mark.parametrize(
    "name", ["cache", "past_key_values", "logits_to_keep", "output_hidden_states", "cache_position"]
)
def test_what_changes_no_key_is_left_out(name):
    assert read_content({"input_ids": IDS, name: 3}).keys == ()


@pytest.mark.parametrize("given", [True, 3, 0.5, "text", [1, "a"], (2, [3])])
def test_other_arguments_are_keys(given):
    (key,) = read_content({"input_ids": IDS, "flag": given}).keys
    assert key.kind == "input:flag"
    assert read_content({"input_ids": IDS, "flag": given}).keys == (key,)
    assert read_content({"input_ids": IDS, "other": given}).keys != (key,)


def test_tensors_are_told_apart_by_numbers_shape_and_dtype():
    pictures = [torch.ones(2, 6), torch.ones(3, 4), torch.ones(2, 6).int(), torch.zeros(2, 6), [torch.ones(2, 6)]]
    keys = {read_content({"input_ids": IDS, "pixel_values": picture}).keys for picture in pictures}
    assert len(keys) == len(pictures)


@pytest.mark.parametrize("inputs", [{}, {"input_ids": [1, 2]}, {"input_ids": torch.ones(3)}])
def test_inputs_without_a_batch_of_positions_are_not_understood(inputs):
    assert read_content(inputs) is None


@pytest.mark.parametrize("given", [object(), {"a": object()}, [object()]])
def test_arguments_that_cannot_be_compared_make_the_whole_unknown(given):
    assert read_content({"input_ids": IDS, "something": given}) is None


def test_what_stands_beside_the_tokens_is_a_sha256_of_its_name_kind_and_bytes():
    types = torch.tensor([[0, 0, 1, 2], [3, 3, 3, 3]])
    found = items({"input_ids": IDS, "token_type_ids": types})
    assert [found[0], found[5]] == [5, 6]
    raw = bytes(32) + b"token_type_ids torch.int64 () " + types[0, 2].numpy().tobytes()
    assert np.array(found[1:5]).tobytes() == hashlib.sha256(raw).digest()
    assert found[1:5] != found[6:10]


def test_equal_numbers_under_another_name_or_dtype_differ():
    numbers = torch.tensor([[0, 0, 3, 3], [3, 3, 3, 3]])
    seen = [
        items({"input_ids": IDS, "token_type_ids": numbers}),
        items({"input_ids": IDS, "mm_token_type_ids": numbers}),
        items({"input_ids": IDS, "position_ids": numbers}),
        items({"input_ids": IDS, "token_type_ids": numbers.to(torch.float64)}),
        items({"input_ids": IDS, "token_type_ids": numbers, "position_ids": numbers}),
        items({"input_ids": IDS, "position_ids": POSITIONS}),
    ]
    assert len({tuple(part) for part in seen}) == len(seen)


def test_embeddings_stand_for_themselves():
    embeds = torch.randn(2, 4, 6)
    found = items({"inputs_embeds": embeds})
    assert found[0] == -1
    assert items({"inputs_embeds": embeds.clone()}) == found
    changed = embeds.clone()
    changed[0, 3, 5] += 1e-6
    other = items({"inputs_embeds": changed})
    assert (other[:5], other[5:] == found[5:]) == (found[:5], False)
    assert items({"inputs_embeds": embeds.to(torch.bfloat16)}) != found


def test_a_copy_does_not_change_with_what_it_was_made_of():
    ids, types, positions = IDS.clone(), torch.ones_like(IDS), POSITIONS + 3
    content = read_content({"input_ids": ids, "token_type_ids": types, "position_ids": positions})
    copy = content.kept()
    before = row_items(copy, 0, KEPT, 0, WIDE)
    for tensor in (ids, types, positions):
        tensor.zero_()
    assert row_items(copy, 0, KEPT, 0, WIDE) == before
    assert row_items(content, 0, KEPT, 0, WIDE) != before


@pytest.mark.parametrize(
    ("positions", "past", "expected"),
    [
        (POSITIONS, [0, 0], True),
        (POSITIONS + 4, [4, 4], True),
        (POSITIONS + 4, [4, 3], False),
        (torch.arange(4)[None], [0, 0], False),  # counts the padding of row 0
        (torch.stack([POSITIONS] * 3), [0, 0], True),  # three kinds of positions
        (torch.stack([POSITIONS, POSITIONS, POSITIONS + 1]), [0, 0], False),
        (POSITIONS.flip(1), [0, 0], False),
    ],
)
def test_plain_positions_count_the_kept_tokens(positions, past, expected):
    content = read_content({"input_ids": IDS, "position_ids": positions})
    assert has_plain_positions(content, KEPT, past) is expected


def test_without_positions_a_model_counts_padding_in():
    content = read_content({"input_ids": IDS})
    assert has_plain_positions(content, None, [0, 0])
    assert has_plain_positions(content, np.ones((2, 4), dtype=bool), [0, 0])
    assert not has_plain_positions(content, KEPT, [0, 0])


@pytest.mark.parametrize("wrong", ["a text", ["a", "text"], [[1, 2], [3]], [1.5, 2.0], [[1, 2], [3, 4]], None])
def test_what_is_not_the_ids_of_one_prompt_is_refused_by_name(wrong):
    with pytest.raises(InvalidConfigError, match="input_ids"):
        one_prompt(wrong)
