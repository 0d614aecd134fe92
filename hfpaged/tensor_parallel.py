"""Models that several processes compute together, under torchrun: transformers' tensor parallelism.

    model = hfpaged.tensor_parallel.load_model("some/model")      # in each process
    model.generate(**inputs, past_key_values=PagedCache(model))   # as ever

Each process (rank) keeps the keys and values of its own heads in a pool of its own.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hfpaged import compat, compat_sharding, whole_weights
from hfpaged.block_hash import ExtraKey
from hfpaged.errors import UnsupportedModelError
from hfpaged.ranks import Ranks

_ranks: weakref.WeakKeyDictionary[PreTrainedModel, Ranks] = weakref.WeakKeyDictionary()


def ranks_of(model: nn.Module | None) -> Ranks | None:
    """Which of the processes that compute `model` this one is; None for a model that one process computes.

    Raises UnsupportedModelError for a model that is spread over processes in another way than by heads and features.
    """
    if model is None:
        return None
    inner = compat.transformers_model(model)
    other = compat_sharding.other_sharding(inner)
    size = compat_sharding.tp_size(inner)
    if other is None and size == 1 and compat_sharding.has_sharded_tensors(inner):
        other = "by other means than transformers' tensor parallelism"
    if other is not None:
        raise UnsupportedModelError(
            f"the weights of this {type(inner).__name__} are spread over processes {other}, and a rank may then have "
            "another batch, or other layers, than the rest; hfpaged knows tensor parallelism: load it with "
            "hfpaged.tensor_parallel.load_model(), or leave the cache to transformers"
        )
    if size == 1:
        return None
    _check_heads(inner, size)
    mesh = compat_sharding.tp_mesh(inner)
    return Ranks(mesh.get_local_rank(), size, mesh.get_group())


def rank_keys(model: PreTrainedModel) -> tuple[ExtraKey, ...]:
    """What tells the keys of this rank from those of others, and of a whole model; asked once per block."""
    if compat_sharding.tp_size(model) == 1:
        return ()
    known = _ranks.get(model) or ranks_of(model)
    if known is None:
        return ()
    _ranks[model] = known
    return (ExtraKey("rank", str(known)),)


def load_model(name: str | os.PathLike[str], model_class: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    """`model_class.from_pretrained(name, **arguments)`, split over all processes that torchrun has started.

    Heads are split where their numbers divide by that of the processes; where not, attention layers are whole on each
    of them, and so are keys and values, while everything else is split. In one process it is a plain from_pretrained.
    Processes that are all on this machine talk over its loopback interface, where GLOO_SOCKET_IFNAME names no other.
    Raises CheckpointError for files that lack weights of the model, or have others than it has a place for.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        _stay_here(os.environ)
        config = arguments.get("config") or AutoConfig.from_pretrained(name, **whole_weights.for_config(arguments))
        plan = None if divides(config, size) else _plan_with_whole_attention(config, model_class, **_trust(arguments))
        arguments = arguments | {"distributed_config": compat_sharding.distributed_config(plan)}
    return whole_weights.load_whole(name, model_class, **arguments)


def _stay_here(environ: MutableMapping[str, str]) -> None:
    """Else gloo takes the interface of the machine's name, and others could connect to what trusts who connects."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"] and loopback:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())


def weights_bytes(model: PreTrainedModel) -> int:
    """Of the parameters and buffers that lie in this process."""
    if compat_sharding.tp_size(model) == 1:
        return int(model.get_memory_footprint())
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(compat_sharding.local(tensor).nbytes for tensor in tensors.values())


def divides(config: PreTrainedConfig, size: int) -> bool:
    """Whether each of `size` processes can have whole heads, of queries as of keys."""
    return not any(count % size for counts in compat_sharding.head_counts(config) for count in counts)


def _plan_with_whole_attention(config: PreTrainedConfig, model_class: Any, **trust: bool) -> dict[str, str]:
    with torch.device("meta"):
        model = model_class.from_config(config, **trust)
    return compat_sharding.with_whole_attention(compat_sharding.tp_plan(model))


def _trust(arguments: dict[str, Any]) -> dict[str, bool]:
    name = "trust_remote_code"
    return {name: arguments[name]} if name in arguments else {}


def _check_heads(model: PreTrainedModel, size: int) -> None:
    """Raises UnsupportedModelError where a head would lie on two ranks."""
    if compat_sharding.splits_heads(compat_sharding.tp_plan(model)) and not divides(model.config, size):
        heads, kv_heads = (" or ".join(map(str, sorted(each))) for each in compat_sharding.head_counts(model.config))
        raise UnsupportedModelError(
            f"{heads} query heads and {kv_heads} heads of keys and values do not divide by {size} ranks, and a head "
            "must not lie on two of them; load the model with hfpaged.tensor_parallel.load_model(), which then keeps "
            "attention whole on each rank, or use a number of ranks that divides both"
        )
