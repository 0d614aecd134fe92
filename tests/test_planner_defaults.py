"""What config.json files leave out is what their family has in transformers: layers, and sizes."""

from __future__ import annotations

import json

import family_defaults
import pytest
import torch
from family_runs import CACHE
from test_planner_families import IS_RECORDED, bytes_of
from transformers import CONFIG_MAPPING, DynamicCache

from hfpaged import compat, model_classes
from hfpaged.errors import InvalidConfigError
from hfpaged.layer_groups import group_layers
from hfpaged.pageable import windows_of
from hfpaged.planner import families
from hfpaged.planner.fields import Fields
from hfpaged.planner.layer_rules import INDEXED
from hfpaged.planner.layer_types import layer_types
from hfpaged.planner.model_reading import facts_of
from hfpaged.planner.pool_layout import dense_bytes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not IS_RECORDED, reason="families.json is of another version of transformers"),
]


def has_indexers(config):
    return any(hasattr(layer, "update_indexer") for layer in compat.default_layers(config))


def groups_by_plan(facts):
    kinds = ("full", "sliding", "chunked")
    return group_layers({i: layer.window for i, layer in enumerate(facts.layers) if layer.kind in kinds})


def test_a_config_that_leaves_everything_out_has_its_familys_layers():
    """All families, those too that are never built here, with the sizes that their config classes have."""
    unlike, refused, tested = [], [], 0
    for model_type in families.families():
        if model_type not in CONFIG_MAPPING:
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
            wanted = group_layers(windows_of(config, compat.default_layers(config)))
        except Exception:  # classes that cannot be made of nothing, or have no layers that a cache knows
            continue
        try:
            facts = facts_of({"model_type": model_type}, model_type)
            types = layer_types(Fields(*families.generating_part({"model_type": model_type})))
        except InvalidConfigError as error:
            refused.append((model_type, str(error)))
            continue
        tested += 1
        if groups_by_plan(facts) != wanted or has_indexers(config) != (INDEXED in types):
            unlike.append(model_type)
    assert tested > 300
    # Its decoder has fewer layers than its encoder, whose number is what transformers makes a cache of.
    assert unlike == ["pp_formulanet"]
    # Nothing to page, and states and indexers that plan knows no sizes of.
    known = "bamba deepseek_v4 falcon_mamba gemma4_assistant gemma4_unified_assistant glm5_next glm5_next_text mamba"
    known += " granitemoehybrid mamba2 minimax openai-gpt reformer rwkv xlnet xlstm"
    assert {name for name, _ in refused} <= set(known.split())
    assert all(name.split("_text")[0] in error for name, error in refused)


# Real sizes: models that are built of nothing but their family's defaults, on the meta device.
REAL = {
    "float32": ["gemma2", "gemma3_text", "gemma4_text", "llama4_text", "qwen3", "falcon_h1", "zamba2", "gpt2"],
    "bfloat16": ["dots3_note_text", "mimo_v2_flash", "qwen3_next", "gpt_oss"],
}


@pytest.mark.parametrize(("dtype", "model_type"), [(dtype, each) for dtype in REAL for each in REAL[dtype]])
def test_a_model_of_default_size_keeps_what_plan_says(dtype, model_type):
    config = CONFIG_MAPPING[model_type]()
    config.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"), torch.no_grad():
            model = model_classes.build(config, model_classes.model_class_of(config))
            cache = DynamicCache(config=config)
            model(input_ids=torch.zeros(1, 5, dtype=torch.long), **{CACHE: cache}, use_cache=True)
    finally:
        torch.set_default_dtype(before)
    facts = facts_of({"model_type": model_type}, model_type)
    assert dense_bytes(facts, 5, dtype=dtype) == sum(bytes_of(vars(layer)) for layer in cache.layers)


def test_the_defaults_are_those_of_transformers():
    assert family_defaults.FILE.read_text(encoding="utf-8") == family_defaults.text(), "run tests/family_defaults.py"


def test_plans_are_those_of_transformers():
    """Heads stand in classes of models, which take long to import: of a few here."""
    recorded = json.loads(family_defaults.PLANS.read_text(encoding="utf-8"))["plans"]
    plans = {name: without_head(plan) for name, plan in recorded.items()}
    found = {name: family_defaults.base_plan(name) for name in family_defaults.families()}
    assert {name: plan for name, plan in plans.items() if plan} == {name: plan for name, plan in found.items() if plan}
    for name in ("llama", "gemma3", "gpt_oss"):
        assert recorded[name] == family_defaults.plan(name), "run tests/family_defaults.py"


def without_head(plan):
    return {name: style for name, style in plan.items() if not name.startswith("lm_head")}
