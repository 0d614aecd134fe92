"""What the families of transformers call their fields, and what they take for those that a config.json leaves out."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

# Where the part that generates is kept inside the config of a larger model: transformers' names, then those of models
# that bring code of their own.
PARTS = (
    "text_config", "decoder", "generator", "decoder_config", "thinker_config", "llm_config", "language_config", "llm",
)  # fmt: skip


@functools.cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((files("hfpaged.planner") / "families.json").read_text(encoding="utf-8"))
    return record


def families() -> dict[str, dict[str, Any]]:
    """By model type, "defaults", "names" and "parts", as tests/family_defaults.py reads them from transformers."""
    known: dict[str, dict[str, Any]] = _record()["families"]
    return known


def recorded_version() -> str:
    """The version of transformers that has these families."""
    return str(_record()["transformers"])


def is_known(model_type: str) -> bool:
    """Whether transformers has a family of this name that generates."""
    return model_type in families()


def generating_part(values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields of the part that generates text, and its model type. A part that is left out is as its family has
    it, and fields of it may stand in the config of the whole.
    """
    model_type = str(values.get("model_type") or "")
    known = families().get(model_type, {}).get("parts", {})
    for key in PARTS:
        part = values.get(key)
        if isinstance(part, dict):
            return generating_part(_inherit(values, part, known.get(key, [model_type])[0]))
    for own_type, given in known.values():
        return generating_part({**given, **values, "model_type": own_type})
    return values, model_type


def _inherit(whole: dict[str, Any], part: dict[str, Any], default_type: str) -> dict[str, Any]:
    """The part with a model type that is known, if there is one, and the dtype of the whole where it has none."""
    model_type = part.get("model_type")
    if model_type is None or (not is_known(model_type) and is_known(default_type)):
        model_type = default_type
    dtypes = {key: whole[key] for key in ("dtype", "torch_dtype") if whole.get(key) is not None}
    has_own = any(part.get(key) is not None for key in ("dtype", "torch_dtype"))
    return {**part, "model_type": model_type, **({} if has_own else dtypes)}
