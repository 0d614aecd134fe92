"""How transformers splits a model over processes (its `tp_plan`), and what of it hfpaged.tensor_parallel leaves whole.

Keys and values are those of a rank's own heads where the plan splits the projection that makes keys, and the numbers of
heads, of queries as of keys, divide by that of the ranks. Else attention stays whole on each rank, and so do its keys
and values: a head is never cut, and none is kept by some ranks only.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib.resources import files

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.layer_parameters import family_of
from hfpaged.planner.model_facts import ModelFacts

# As hfpaged.compat_sharding has them, which needs torch.
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_SPLITS = re.compile(r".*(colwise|rowwise).*")
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "embeddings")


def tp_plan(facts: ModelFacts) -> dict[str, str]:
    """By the name of a module, with * for numbers, how its weights are split; empty where transformers splits none."""
    own, whole = _plans().get(family_of(facts), {}), _plans().get(facts.model_type, {})
    head = {name: style for name, style in whole.items() if name.startswith("lm_head")}
    return {name: style for name, style in (own | head).items() if _SPLITS.fullmatch(style)}


def splits_heads(facts: ModelFacts, tp: int) -> bool:
    """Whether each of `tp` ranks keeps keys and values of heads of its own."""
    plan = tp_plan(facts)
    return divides(facts, tp) and any(
        name.rsplit(".", 1)[-1] in KEY_PROJECTIONS and style == "colwise" for name, style in plan.items()
    )


def divides(facts: ModelFacts, tp: int) -> bool:
    """Whether each of `tp` ranks can have whole heads."""
    counts = (facts.attention_heads, *(layer.kv_heads for layer in facts.layers if not layer.latent_dim))
    return not any(count % tp for count in counts)


def split_names(facts: ModelFacts, tp: int) -> dict[str, str]:
    """`tp_plan` on `tp` ranks, without attention where that stays whole."""
    plan = tp_plan(facts)
    if divides(facts, tp):
        return plan
    whole = tuple(name.rsplit(".", 1)[0] + "." for name in plan if name.rsplit(".", 1)[-1] in KEY_PROJECTIONS)
    return {name: style for name, style in plan.items() if not (whole and name.startswith(whole))}


def split_kinds(facts: ModelFacts, tp: int) -> set[str]:
    """Which of the parts that are counted from a config are split: attention, mlp, experts, embedding, head."""
    return set(map(_kind, split_names(facts, tp)))


def is_embedding(name: str) -> bool:
    """Whether a module of this name is the embedding of the vocabulary."""
    return name.rsplit(".", 1)[-1] in _EMBEDDINGS


def check_tp(facts: ModelFacts, tp: int) -> None:
    """Raises InvalidConfigError for numbers of ranks on which transformers cannot compute this model."""
    if not isinstance(tp, int) or tp < 1:
        raise InvalidConfigError(f"tp={tp} is no number of ranks; use 1 or more")
    if tp > 1 and not tp_plan(facts):
        raise InvalidConfigError(
            f"tp={tp}: transformers has no tp_plan for models of type {facts.model_type!r}, so that {facts.name} "
            "cannot be split over devices; leave --tp out, and use --replicas where one is not enough"
        )


@functools.cache
def _plans() -> Mapping[str, dict[str, str]]:
    record = json.loads((files("hfpaged.planner") / "tp_plans.json").read_text(encoding="utf-8"))
    plans: dict[str, dict[str, str]] = record["plans"]
    return plans


def _kind(name: str) -> str:
    """Which of the counted parts a module belongs to."""
    if "lm_head" in name:
        return "head"
    if is_embedding(name):
        return "embedding"
    if "attn" in name or "attention" in name:
        return "attention"
    return "experts" if ".experts." in name else "mlp"
