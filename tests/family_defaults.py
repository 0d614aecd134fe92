"""What config.json files leave out: the defaults of all config classes of transformers that generate text, kept in
hfpaged/planner/families.json for the planner, which imports no transformers; and how transformers splits each family
over processes, kept in tp_plans.json beside it. Run this after an update of transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

FILE = Path(__file__).parent.parent / "hfpaged" / "planner" / "families.json"
PLANS = FILE.with_name("tp_plans.json")
PARTS = (
    "text_config",
    "decoder",
    "generator",
    "decoder_config",
    "thinker_config",
)  # what may be the part that generates
# What says nothing of sizes.
NOISE = re.compile(
    r".*(_token_(id|index)|token_id|dropout|drop|_prob|_eps|eps|initializer|seed|_std|_loss|loss_|_coef|_act|activation|"
    r"_scale|scale_|temperature|_bias|bias|_id\b|jitter|beam|labels|summary|spec_augment|mask_|vision|image|video|audio|"
    r"speech|vocoder|t2u|codec|unit_|forced|router_z|ignore|clip|output_(hidden|att|router)|penalty|return|use_cache|chunk_size_feed|"
    r"is_decoder|add_cross|torchscript|early_stopping|slow_but).*"
    r"|(architectures|transformers_version|id2label|label2id|rope_parameters|dtype|problem_type|eos|bos|pad)"
)
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM")


def families() -> dict[str, dict[str, Any]]:
    """By model type: "defaults" of fields, other "names" of fields, and the "parts" inside with (type, fields)."""
    types = {
        name
        for mapping in MAPPINGS
        for name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        if name in CONFIG_MAPPING
    }
    found: dict[str, dict[str, Any]] = {}
    todo = {name: CONFIG_MAPPING[name] for name in sorted(types)}
    while todo:
        name, cls = todo.popitem()
        parts = {key: spec for key, spec in cls.sub_configs_defaults.items() if key in PARTS}
        found[name] = _family(cls, parts)
        todo |= {
            spec.model_type: spec.get_config_class(spec.model_type)
            if not issubclass(spec.config_class, PreTrainedConfig)
            else spec.config_class
            for spec in parts.values()
            if spec.model_type not in found
        }
    return dict(sorted(found.items()))


def _family(cls: type[PreTrainedConfig], parts: dict[str, Any]) -> dict[str, Any]:
    family: dict[str, Any] = {"defaults": {} if parts and "num_hidden_layers" not in _fields(cls) else _defaults(cls)}
    if names := {ours: theirs for ours, theirs in cls.attribute_map.items() if not NOISE.fullmatch(ours)}:
        family["names"] = names
    if parts:
        family["parts"] = {
            key: [
                spec.model_type,
                _plain(spec.init_kwargs) | {k: None for k, v in spec.init_kwargs.items() if v is None},
            ]
            for key, spec in parts.items()
        }
    return family


def _fields(cls: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _defaults(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return _plain(values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in sorted(values.items()) if not NOISE.fullmatch(name) and _is_size(name, value)
    }


def _is_size(name: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, (int, str)) for each in value)
    return isinstance(value, (bool, int)) or (isinstance(value, str) and (len(value) < 16 or "pattern" in name))


def text() -> str:
    """The file: a line for each family."""
    lines = [f"  {json.dumps(name)}: {json.dumps(family)}" for name, family in families().items()]
    head = f' "transformers": {json.dumps(transformers.__version__)},\n "families": {{\n'
    return "{\n" + head + ",\n".join(lines) + "\n }\n}\n"


def plans() -> dict[str, dict[str, str]]:
    """By model type, how transformers splits which modules; families that it splits nothing of are left out."""
    return {name: found for name in families() if (found := plan(name))}


def plan(model_type: str) -> dict[str, str]:
    """The modules of all layers, and the head."""
    head = {f"lm_head{key[7:]}": style for key, style in _head(model_type).items() if key.startswith("lm_head")}
    return base_plan(model_type) | head


def base_plan(model_type: str) -> dict[str, str]:
    """Without the head; with the embedding, as DistributedMixin.init_parallel_plans adds it."""
    own = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) or {}
    return {"embed_tokens": "embedding_rowwise", **own} if own else {}


def _head(model_type: str) -> dict[str, str]:
    """Of the class that generates."""
    for mapping in MAPPINGS:
        cls = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(model_type)
        if cls is not None:
            return getattr(getattr(transformers, cls, None), "_tp_plan", None) or {}
    return {}


def plans_text() -> str:
    """The file: a line for each family."""
    lines = [f"  {json.dumps(name)}: {json.dumps(plan)}" for name, plan in plans().items()]
    return '{\n "plans": {\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    PLANS.write_text(plans_text(), encoding="utf-8")
    FILE.write_text(text(), encoding="utf-8")
