"""A plan in sentences."""

from __future__ import annotations

from collections import Counter

from hfpaged.planner.fit import MANY, Fit
from hfpaged.planner.kv_formats import dtype_bytes
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.tiers import tiers
from hfpaged.planner.tp_plan import divides, splits_heads
from hfpaged.planner.units import counted, decimal

_SEEN = {"full": "full attention", "state": "a state for each sequence", "dense": "caches that are not paged"}
_PARTS = {2: "half", 3: "a third", 4: "a quarter", 8: "an eighth"}


def verdict(found: Fit) -> str:
    """One sentence: whether it fits, and how much is left or missing."""
    workload, pool = found.case.workload, decimal(max(0, found.pool))
    if found.pool <= 0:
        return f"does not fit: {_too_large(found)}"
    replicas = found.case.choices.replicas
    several = f"{counted(found.concurrency, 'request')} of {workload.tokens:,} tokens"
    several += f" on each of {replicas} replicas" * (replicas > 1)
    one = found.concurrency == 1
    if found.fits:
        more = "" if workload.concurrency is None else f"; {_count(found.sequences)} would"
        return f"fits: {several} {'takes' if one else 'take'} {decimal(found.needed)} of the pool's {pool}{more}"
    if found.kv_bytes(workload.tokens, found.concurrency) <= found.pool:
        several, one = f"one request of --context {workload.context:,} tokens", True
    can = f"{_count(found.sequences)} of {workload.tokens:,} tokens would fit"
    need = "needs" if one else "need"
    short = f"the pool has {pool}: {decimal(found.short)} short"
    return f"does not fit: {several} {need} {decimal(found.needed)}, {short}; {can}"


def layers(facts: ModelFacts) -> list[str]:
    """What the layers keep, equal ones together."""
    size = dtype_bytes(facts.dtype)
    return [f"{count} x {_layer(layer, size)}" for layer, count in Counter(facts.layers).items()]


def grouped(facts: ModelFacts) -> str | None:
    """How much of multi-head attention's keys and values a model with fewer KV heads has; a latent is neither."""
    heads = {layer.kv_heads for layer in facts.layers if layer.kv_heads}
    has_latents = any(layer.key_dim != layer.value_dim or layer.latent_dim for layer in facts.layers)
    if has_latents or len(heads) != 1 or facts.attention_heads <= max(heads) or facts.attention_heads % max(heads):
        return None
    times = facts.attention_heads // max(heads)
    few, part = counted(max(heads), "KV head"), _PARTS.get(times, f"1/{times}")
    return f"{few} for {facts.attention_heads} heads: {part} of the keys and values of multi-head attention"


def remarks(found: Fit) -> list[str]:
    """What one should know before believing the figures."""
    facts, workload, choices = found.case.sizes.facts, found.case.workload, found.case.choices
    said = []
    if facts.max_positions and workload.context > facts.max_positions:
        said.append(f"--context {workload.context:,} is beyond the {facts.max_positions:,} positions of the config")
    said += ranks(found)
    if (choices.swap_space or choices.store_size) and not tiers(found):
        said.append("no tier keeps anything of this model: its layers keep states, or no keys and values in blocks")
    if choices.window is not None:
        said.append("--window is for PagedCache(model, window=); `hfpaged serve` keeps all tokens of a request")
    if found.case.machine.count > 1 and choices.tp == choices.replicas == 1:
        said.append(f"{found.case.machine.count} such cards are here; the plan is for one (--tp, --replicas)")
    return said


def no_tiers(found: Fit) -> list[str]:
    """What replays and sweeps leave out of what was chosen."""
    choices = found.case.choices
    if choices.swap_space or choices.store_size:
        return ["tiers below the pool are left out: what they would bring back is computed here"]
    return []


def replayed_ranks(found: Fit, *, measured: bool) -> list[str]:
    """What a replay takes several ranks for; steps may have been `measured`."""
    tp = found.case.choices.tp
    if tp == 1:
        return []
    pool = f"the pool is that of each of {tp} ranks, which hold the same blocks"
    if measured:
        return [f"{pool}; steps take what was given or measured, whatever --tp says"]
    return [f"{pool}; steps read one rank's part of the weights, and what ranks tell each other takes no time"]


def one_pool(found: Fit) -> list[str]:
    """What a sweep, whose curve is that of one pool, leaves out of what was chosen."""
    replicas = found.case.choices.replicas
    if replicas > 1:
        why = f"this is one of {replicas} replicas, which gets all requests of a trace"
        return [f"{why}; a replay without --sweep knows all of them", *no_tiers(found)]
    return no_tiers(found)


def ranks(found: Fit) -> list[str]:
    """What --tp does not divide."""
    facts, tp = found.case.sizes.facts, found.case.choices.tp
    kept = [layer for layer in facts.layers if layer.kv_heads]
    if tp == 1 or not kept or (splits_heads(facts, tp) and not any(layer.latent_dim for layer in kept)):
        return []
    if any(layer.latent_dim for layer in kept):
        return [f"latents are whole on each of {tp} ranks: --tp makes no room for keys and values but that of weights"]
    why = f"{facts.attention_heads} heads and {kept[0].kv_heads} KV heads do not all divide by --tp {tp}"
    if divides(facts, tp):
        why = f"transformers' tp_plan splits no heads of models of type {facts.model_type!r}"
    return [f"{why}: attention, and keys and values with it, is whole on each rank"]


def _too_large(found: Fit) -> str:
    usable = f"the {decimal(found.usable)} that may be used"
    if found.weights.bytes > found.usable:
        return f"the weights alone take {decimal(found.weights.bytes)}, more than {usable}"
    spent = found.usable - found.pool
    return f"before there is a pool {decimal(spent)} of {usable} are taken"


def _count(sequences: int) -> str:
    return f"{sequences:,}" if sequences < MANY else "any number"


def _layer(layer: LayerKV, size: int) -> str:
    """`size`: bytes of a number in the model's dtype."""
    sizes = f"{counted(layer.kv_heads, 'KV head')} x {layer.key_dim}"
    sizes += f" and {layer.value_dim}" * (layer.key_dim != layer.value_dim)
    if layer.kind == "borrowed":
        return "what another layer keeps"
    if layer.kind == "none":
        return "nothing, as they attend to no text"
    if layer.kind == "state":
        return f"{_SEEN['state']} ({decimal(layer.state_bytes + size * layer.state_dim)})"
    seen = _SEEN.get(layer.kind) or f"{layer.kind}, {layer.window:,} tokens"
    return f"{seen}, {sizes}"
