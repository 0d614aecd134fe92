"""Models that see pictures, with real (tiny) ones: the same tokens as with their own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_configs import HIDDEN, tiny_config
from tiny_models import with_large_weights
from transformers import PreTrainedModel, set_seed

import hfpaged
from hfpaged import attention, compat, model_classes
from hfpaged.verdict import FAST, examine

CACHE = compat.cache_argument()
IMAGE, START, END = 95, 93, 92
TOKENS = {"image_token_id": IMAGE, "video_token_id": 94, "vision_start_token_id": START, "vision_end_token_id": END}
PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "out_hidden_size": HIDDEN, "depth": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": {"image_size": 32, "patch_size": 8},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "llava": {
        "BASE": {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model"}},
        "vision_config": {"image_size": 16, "patch_size": 8},
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
    },
    "qwen2_5_vl": TOKENS
    | {"vision_config": PATCHES | {"window_size": 32, "fullatt_block_indexes": [1]}, "text_config": ROPE},
    "qwen3_vl": TOKENS
    | {"vision_config": PATCHES | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}}
    | {"text_config": ROPE},
}
# Gemma 3 lets the tokens of a picture see all of it: that one step is none for our kernels.
DENSE = {"gemma3": "a mask that is not causal with padding"}
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}


def build(name: str) -> PreTrainedModel:
    config = tiny_config(name, MODELS[name])
    model_class = model_classes.model_class_of(config)
    assert model_class is not None
    torch.manual_seed(0)
    return with_large_weights(model_classes.build(config, model_class))


def inputs(name: str, is_padded: bool) -> dict[str, torch.Tensor]:
    """Two rows with one picture of four tokens in each; the second begins with padding."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 90, (2, 14), generator=generator)
    ids[0, 2:8] = ids[1, 5:11] = torch.tensor([START, *[IMAGE] * 4, END])
    mask = torch.ones_like(ids)
    if is_padded:
        ids[1, :3], mask[1, :3] = 0, 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name.startswith("qwen"):
        patches = torch.randn(2 * 16, 3 * 2 * 8 * 8, generator=generator)
        kinds = {"mm_token_type_ids": (ids == IMAGE).long()}
        return given | kinds | {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    size = MODELS[name]["vision_config"]["image_size"]
    given["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    return given | ({"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {})


def generate(model: PreTrainedModel, given: dict[str, torch.Tensor], mode: str, cache: Any = None) -> Any:
    set_seed(7)
    arguments = MODES[mode] | given | ({} if cache is None else {CACHE: cache})
    return model.generate(**arguments, max_new_tokens=6, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_pictures_give_the_tokens_of_the_models_own_cache(name, is_padded):
    model, given = build(name), inputs(name, is_padded)
    for mode in MODES:
        wanted = generate(model, given, mode)
        for is_patched in (False, True):
            cache = hfpaged.PagedCache(model) if is_patched else hfpaged.PagedCache(config=model.config)
            attention.dense_calls.clear()
            output = generate(model, given, mode, cache)
            hfpaged.unpatch(model)
            assert output.sequences.tolist() == wanted.sequences.tolist(), (mode, is_patched)
            torch.testing.assert_close(torch.stack(output.logits), torch.stack(wanted.logits), atol=1e-4, rtol=1e-4)
            if is_patched:
                assert set(attention.dense_calls) == ({DENSE[name]} if name in DENSE else set())
            cache.pool.check_integrity()


@pytest.mark.parametrize("name", MODELS)
def test_the_pictures_matter(name):
    model, given = build(name), inputs(name, False)
    other = given | {"pixel_values": given["pixel_values"].flip(0)}
    ours, theirs = (torch.stack(generate(model, some, "greedy").logits) for some in (given, other))
    assert not torch.allclose(ours, theirs, atol=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_support_speaks_of_their_text(name):
    assert examine(build(name).config).outcome == FAST
