"""How transformers spreads a model over processes: what it notes on the model, and how it is asked for. Like `compat`,
one of the files that look at what differs between versions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

# Projections whose output holds the keys, fused or not.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def tp_size(model: PreTrainedModel) -> int:
    """Over how many processes transformers has split its layers; 1 for a model that is whole."""
    return int(getattr(model, "_tp_size", None) or 1)


def tp_mesh(model: PreTrainedModel) -> Any:
    """The mesh [tp_size] of those processes. Later versions keep the mesh of all ways to spread a model."""
    mesh: Any = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def other_sharding(model: PreTrainedModel) -> str | None:
    """How else transformers has spread the model; None where it has not."""
    config = getattr(model.config, "distributed_config", None)
    for name, size in (("fsdp", "fsdp_size"), ("fsdp", "dp_replicate_size"), ("pipeline parallelism", "pp_size")):
        count = getattr(config, size, None) or 1
        if count > 1:
            return f"by {name} over {count} groups ({size}={count})"
    if "sequence_parallel" in tp_plan(model).values():
        return "by sequence parallelism (a tp_plan with the style sequence_parallel)"
    return None


def tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """By the name of a module or parameter, with * for the number of a layer: how it is split."""
    return dict(getattr(model, "_tp_plan", None) or {})


def splits_heads(plan: dict[str, str]) -> bool:
    """Whether under this plan each process has heads of its own."""
    return any(name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise" for name, style in plan.items())


def with_whole_attention(plan: dict[str, str]) -> dict[str, str]:
    """This plan, with all weights of attention layers on each process."""
    layers = {name.rsplit(".", 1)[0] + "." for name in plan if name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS}
    styles = {name: "replicate" if name.startswith(tuple(layers)) else style for name, style in plan.items()}
    if _plans_are_merged():
        return styles
    return {name: style for name, style in styles.items() if style != "replicate"}


def distributed_config(plan: dict[str, str] | None) -> DistributedConfig:
    """What from_pretrained() takes, for all processes of torchrun; None is the plan that the model brings."""
    return DistributedConfig(tp_plan="auto" if plan is None else plan)


def head_counts(config: PreTrainedConfig) -> tuple[set[int], set[int]]:
    """(numbers of query heads, numbers of heads of keys and values) that layers have; empty where there are none."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", None) or [text]  # since 5.20 or so
    heads = [_numbers(layer, "num_attention_heads") for layer in layers]
    kv_heads = [_numbers(layer, "num_key_value_heads") or own for layer, own in zip(layers, heads, strict=True)]
    return set().union(*heads), set().union(*kv_heads)


def _numbers(layer: Any, name: str) -> set[int]:
    """What a config says, where it is one number or one for each layer."""
    given = getattr(layer, name, None)
    return {int(each) for each in (given if isinstance(given, (list, tuple)) else [given]) if each}


def _plans_are_merged() -> bool:
    """Whether a plan is put over the model's own (5.18 or so), or takes its place."""
    from transformers.distributed.configuration_utils import DistributedConfig as Config

    return "fsdp_plan" in Config.__dataclass_fields__


def has_sharded_tensors(model: torch.nn.Module) -> bool:
    """Whether a weight is a part of one that is spread over processes."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a weight that lies in this process."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
