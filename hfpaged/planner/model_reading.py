"""From a model's config.json to the facts that a plan needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpaged.planner.config_file import read_config
from hfpaged.planner.fields import Fields
from hfpaged.planner.model_facts import LayerKV, ModelFacts


def read_model(name: str) -> ModelFacts:
    """The facts of `name`: a folder, a config.json, or a hub id.

    Raises InvalidConfigError, which says what was looked for, where a config cannot be found, read or understood.
    """
    found = read_config(name)
    return facts_of(found.values, found.name, found.path.parent)


def facts_of(values: dict[str, Any], name: str, folder: Path | None = None) -> ModelFacts:
    """The facts in the fields of one config.json. Raises InvalidConfigError."""
    model_type = str(values.get("model_type", ""))
    fields = Fields(values, model_type)
    heads = fields.count("heads")
    hidden = fields.count("hidden")
    dim = fields.count("head_dim", hidden // heads)
    layer = LayerKV("full", fields.count("kv_heads", heads), dim, dim)
    return ModelFacts(
        name=name,
        model_type=model_type,
        dtype=str(fields.get("dtype", "float32")).removeprefix("torch."),
        layers=(layer,) * fields.count("layers"),
        attention_heads=heads,
        hidden_size=hidden,
        intermediate_size=int(fields.get("inner", 0)),
        vocab_size=int(fields.get("vocab", 0)),
        max_positions=fields.get("positions"),
        config=dict(values),
        whole=dict(values),
        folder=None if folder is None else str(folder),
    )
