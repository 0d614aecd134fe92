from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from hfpaged import compat
from hfpaged.cache import PagedCache
from hfpaged.errors import CacheMismatchError
from hfpaged.kv_format import FORMATS
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import LayerGroup
from hfpaged.rows import Rows
from hfpaged.step import StepPlan
from hfpaged.step_plan import plan_step


def rows_of(*kept):
    """Rows that hold what is True in the rows of `kept`; without it, rows that hold nothing."""
    rows = Rows(KVPool((LayerGroup(None, (0,)),), block_size=4, kv_format=FORMATS["auto"], num_blocks=64))
    if kept:
        rows.expect(StepPlan(np.array(kept, dtype=bool), list(range(len(kept)))))
        rows.join(0, len(kept), len(kept[0]))
    return rows


IDS = torch.tensor([[7, 5, 6], [7, 5, 6], [7, 5, 6], [1, 2, 3]])


def equal_rows(**inputs):
    """For each row of IDS the first equal one, when these inputs come with them."""
    return plan_step(rows_of(), {"input_ids": IDS} | inputs).same_as


def test_inputs_say_which_rows_are_equal_and_what_is_padding():
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    plan = plan_step(rows_of(), {"attention_mask": mask, "input_ids": IDS})
    assert plan.same_as == [0, 0, 2, 3]
    assert plan.kept.tolist() == mask.bool().tolist()


@pytest.mark.parametrize("mask", [{}, {"attention_mask": None}, {"attention_mask": torch.ones(4, 3)}], ids=str)
def test_without_padding_there_is_nothing_to_keep_out(mask):
    assert plan_step(rows_of(), {"input_ids": IDS} | mask) == StepPlan(None, [0, 0, 0, 3])
    assert plan_step(rows_of(), {"input_ids": None} | mask) is None
    assert plan_step(rows_of(), mask) is None


def test_padding_is_told_without_ids_too():
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]])
    plan = plan_step(rows_of(), {"inputs_embeds": torch.ones(2, 3, 8), "attention_mask": mask})
    assert plan.kept.tolist() == mask.bool().tolist()
    assert plan.same_as == [0, 1]


def test_a_mask_of_another_length_than_the_ids_makes_no_rows_equal():
    plan = plan_step(rows_of(), {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]] * 4)})
    assert plan.same_as == [0, 1, 2, 3]


def test_inputs_of_a_later_step_tell_of_the_new_positions_only():
    rows = rows_of([0, 1, 1], [1, 1, 1])
    same = torch.tensor([[9], [9]])
    assert plan_step(rows, {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), "input_ids": same}) is None
    plan = plan_step(rows, {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]), "input_ids": same})
    assert plan.kept.tolist() == [[True], [False]]
    assert plan.same_as == [0, 1]


def test_positions_that_were_padding_cannot_be_asked_for_later():
    rows = rows_of([1, 1, 1], [1, 0, 1])
    with pytest.raises(CacheMismatchError, match="row 1, position 1 was padding"):
        plan_step(rows, {"attention_mask": torch.ones(2, 4), "input_ids": None})
    with pytest.raises(CacheMismatchError, match="pass the attention_mask of all 3 positions"):
        plan_step(rows, {"attention_mask": None, "input_ids": torch.tensor([[1], [2]])})


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_rows_are_equal_only_if_each_other_input_is(name):
    given = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 2]])
    assert equal_rows(**{name: given}) == [0, 0, 2, 3]
    assert equal_rows(**{name: given[[0] * 4]}) == [0, 0, 0, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
def test_inputs_of_all_dtypes_tell_rows_apart(dtype):
    given = torch.tensor([[1, 0], [1, 1], [1, 0], [1, 0]]).to(dtype)
    assert equal_rows(token_type_ids=given) == [0, 1, 0, 3]
    assert equal_rows(inputs_embeds=given[:, :, None].expand(4, 2, 5).transpose(1, 2)) == [0, 1, 0, 3]


@pytest.mark.parametrize("name", ["labels", "pixel_values", "anything_else"])
def test_an_input_that_is_not_known_by_row_keeps_all_rows_apart(name):
    assert equal_rows(**{name: torch.zeros(4, 3)}) == [0, 1, 2, 3]


def test_positions_on_three_axes_keep_all_rows_apart():
    assert equal_rows(position_ids=torch.zeros(4, 4, 3)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": torch.arange(3)[None]},
        {"logits_to_keep": torch.tensor(1)},
        {"use_cache": True, "logits_to_keep": 1, "scale": 0.5, "mode": "fast", "labels": None},
        {"past_key_values": object(), "cache": object()},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_holds_for_all_rows_leaves_equal_ones_equal(given):
    assert equal_rows(**given) == [0, 0, 0, 3]


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(9, 3),  # pictures: more than rows
        torch.zeros(1, 3),
        [1, 2, 3, 4],
        (torch.zeros(4, 3),),
        {"pixel_values": torch.zeros(4, 3)},
        np.zeros((4, 3)),
        object(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_with_what_belongs_to_rows_in_an_unknown_way_none_are_equal(given):
    assert equal_rows(given=given) == [0, 1, 2, 3]


def test_position_ids_of_another_first_dimension_make_no_rows_equal():
    assert equal_rows(position_ids=torch.arange(3).expand(3, 4, 3)) == [0, 1, 2, 3]  # [axes, batch, query_length]


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.3}  # so that inputs make a difference


def assert_same_as_dynamic_cache(model, config, first, second):
    """Two forwards give the logits that they give with transformers' own cache."""
    logits = []
    for cache in (transformers.DynamicCache(config=config), PagedCache(model, num_blocks=64)):
        with torch.no_grad():
            model(**{compat.cache_argument(): cache}, **first)
            logits.append(model(**{compat.cache_argument(): cache}, **second).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert (logits[0][0] - logits[0][1]).abs().max() > 1e-2  # the rows do differ


def test_rows_of_equal_ids_at_other_positions_give_what_each_gives():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **SIZES)).eval()
    positions = torch.stack([torch.arange(5), torch.arange(5) * 3])
    assert_same_as_dynamic_cache(
        model,
        model.config,
        {"input_ids": torch.tensor([[1, 2, 3, 4, 5]] * 2), "position_ids": positions},
        {"input_ids": torch.tensor([[6], [6]]), "position_ids": torch.tensor([[5], [15]])},
    )


def test_equal_prompts_with_different_images_give_what_each_gives():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=32, **SIZES),
        text_config=transformers.LlamaConfig(vocab_size=50, **SIZES),
        image_token_index=49,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 49, 49, 49, 49, 2, 3]] * 2)
    assert_same_as_dynamic_cache(
        model,
        config.text_config,
        {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28) * 3, "attention_mask": torch.ones_like(ids)},
        {"input_ids": torch.tensor([[6], [6]]), "attention_mask": torch.ones(2, 8, dtype=torch.long)},
    )
