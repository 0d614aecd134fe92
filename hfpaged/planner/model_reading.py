"""From a model's config.json to the facts that a plan needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.config_file import read_config
from hfpaged.planner.families import generating_part, is_known
from hfpaged.planner.fields import Fields, missing
from hfpaged.planner.head_shapes import attention_heads
from hfpaged.planner.layers import cross_layers_of, layers_of
from hfpaged.planner.model_facts import ModelFacts

_PAGED = ("full", "sliding", "chunked")
# Families whose caches transformers makes as classes of their own, or that take none.
_OWN_CACHE = (
    "blt", "deepseek_v4", "falcon_mamba", "mamba", "mamba2", "minimax", "openai-gpt", "reformer", "rwkv",
    "unlimited_ocr_text", "xlnet", "xlstm",
)  # fmt: skip


def read_model(name: str) -> ModelFacts:
    """The facts of `name`: a folder, a config.json, or a hub id.

    Raises InvalidConfigError, which says what was looked for, where a config cannot be found, read or understood.
    """
    found = read_config(name)
    return facts_of(found.values, found.name, found.path.parent)


def facts_of(values: dict[str, Any], name: str, folder: Path | None = None) -> ModelFacts:
    """The facts in the fields of one config.json. Raises InvalidConfigError."""
    part, model_type = generating_part(values)
    fields = Fields(part, model_type)
    _check(fields, str(values.get("model_type") or model_type))
    layers = layers_of(fields)
    if not any(layer.kind in _PAGED for layer in layers):
        raise InvalidConfigError(_nothing(name, model_type))
    inner: Any = fields.get("intermediate_size", 0)
    return ModelFacts(
        name=name,
        model_type=str(values.get("model_type") or model_type),
        dtype=str(fields.get("dtype") or "float32").removeprefix("torch."),
        layers=layers,
        cross_layers=cross_layers_of(fields),
        attention_heads=attention_heads(fields),
        hidden_size=int(fields.get("hidden_size", 0)),
        intermediate_size=max(inner) if isinstance(inner, list) else int(inner),
        vocab_size=int(fields.get("vocab_size", 0)),
        max_positions=fields.get("max_position_embeddings"),
        config=fields.merged(),
        whole=dict(values),
        folder=None if folder is None else str(folder),
        notes=tuple(_notes(fields)),
    )


def _check(fields: Fields, whole: str) -> None:
    """Families that nothing can be paged of, and what a config of every other family has."""
    if {fields.model_type, whole} & set(_OWN_CACHE) or whole.endswith("_assistant"):
        raise InvalidConfigError(_nothing("the config", whole))
    needed = {"num_hidden_layers": None, "num_attention_heads": None}
    needed.pop("num_hidden_layers" if fields.model_type == "nemotron_h" else "", None)
    needed.pop("num_attention_heads" if fields.model_type == "jetmoe" else "", None)
    lacking = [name for name in needed if fields.get(name) is None]
    if lacking:
        raise missing(fields, lacking)


def _nothing(name: str, model_type: str) -> str:
    return (
        f"{name} is of model type {model_type!r}, which keeps no keys and values that hfpaged can page (`hfpaged "
        "support` tells why), so there is no pool to plan"
    )


def _notes(fields: Fields) -> list[str]:
    notes = []
    if not is_known(fields.model_type):
        read = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
        said = ", ".join(f"{name} = {fields.get(name)}" for name in read if fields.get(name) is not None)
        notes.append(
            f"model type {fields.model_type or 'none'!r} is not known to plan; the usual fields were taken: {said}"
        )
    if fields.get("dtype") is None:
        notes.append("the config names no dtype; float32 is what transformers takes then")
    return notes
