"""The attention function that a patched model calls: paged kernels where they know the case, else the dense path."""

from __future__ import annotations

import logging
from typing import Any

import hfpaged_kernels as kernels
import torch
from torch import Tensor, nn

from hfpaged import compat
from hfpaged.attention_origin import origin
from hfpaged.handle import LazyKV
from hfpaged.kv_storage import LayerStore
from hfpaged.layer_step import LayerStep, flat_tokens
from hfpaged.mask import LazyMask
from hfpaged.new_blocks import NewBlocks, new_blocks
from hfpaged.step import Step

logger = logging.getLogger("hfpaged")

# How often the dense path ran for keys that lie in a pool, by reason: what has been said once. Pools keep counts of
# their own, which metrics read: of a process and of a model are two questions.
dense_calls: dict[str, int] = {}


@torch.compiler.disable  # torch.compile breaks its graph here: block tables are no constants
def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Registered with transformers as "hfpaged". query [batch, num_heads, length, dim], key and value as
    `PagedCache.update` returned them; gives [batch, length, num_heads, value_dim] and no weights.

    With any other key (no cache, another cache) it does what the model's own implementation would do.
    """
    if isinstance(key, LazyKV) and isinstance(value, LazyKV):
        reason = _why_dense(key.step, query, attention_mask, dropout, kwargs)
        if reason is None:
            assert isinstance(attention_mask, LazyMask)
            return _paged(module, key.step, query, _window(key.step, attention_mask), scaling, kwargs), None
        key.step.rows.check_whole(key.step.group, reason)
        key.step.rows.pool.counts.count_dense_call(reason)
        _count(reason, module)
    return _dense(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _why_dense(
    step: LayerStep, query: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """None when the kernels know the case, else why not."""
    if not isinstance(mask, LazyMask) or not mask.is_plain:
        step.rows.see_later_tokens()
        return "a mask that is not causal with padding"
    if dropout or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        return "dropout, a position bias or attention that is not causal"
    if kwargs.get("output_attentions") or compat.collects_attentions():
        return "output_attentions"
    if query.requires_grad:
        return "gradients"
    fits = query.shape[2] == step.key.shape[2] or mask.is_of_last_query(step.rows)
    if not step.step.is_contiguous or not fits or query.shape[3] != step.key.shape[3]:
        return "padding inside of a row, or queries of another shape than the keys"
    if step.sees_more(mask.window) and not step.step.is_decode:
        return "a mask that sees more than the window that the cache keeps"
    if step.rows.late_padding:
        return "padding behind the tokens of a row"  # its outputs would be those of tokens; we compute none
    if not mask.agrees_with(step.rows):
        return "an attention mask that differs from the padding in the cache"
    return None


def _window(step: LayerStep, mask: LazyMask) -> int | None:
    """The window of the mask, but no more than the cache still shows (Moshi masks without one). Where the cache
    forgets, all that it has is seen.
    """
    if step.rows.streams(step.group):
        return None
    return step.window if step.sees_more(mask.window) else mask.window


def _paged(
    module: nn.Module, step: LayerStep, query: Tensor, window: int | None, scaling: float | None, kwargs: dict[str, Any]
) -> Tensor:
    batch, num_heads, length, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    softcap, sinks = _heeded(module, kwargs.get("softcap"), kwargs.get("s_aux"))
    whole = length == step.key.shape[2]
    if step.sees_new and whole and softcap is None and sinks is None and (window is None or length <= window):
        return _first_prefill(module, step, query, scale)
    flat = flat_tokens(query)
    store, meta = new_blocks(step) if step.sees_new and not step.stores_as_computed else (step.store, step.step)
    if flat.device.type != "cpu":  # kernels for GPUs want one dtype; those for CPUs widen as they read
        flat = flat.to(store.key.dtype)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if meta.parts:
        first = meta.parts[0].num_seqs  # its decodes, one token each
        out = torch.cat(
            [
                _attend(flat[:first], store, meta.parts[0], options, is_decode=True),
                _attend(flat[first:], store, meta.parts[1], options, is_decode=False),
            ]
        )
    else:
        out = _attend(flat, store, meta, options, is_decode=meta.is_decode or not whole)
    if out.dtype != query.dtype:
        out = out.to(query.dtype)
    return out.view(batch, length, num_heads, -1)


def _attend(
    query: Tensor, store: LayerStore | NewBlocks, meta: Step, options: dict[str, Any], is_decode: bool
) -> Tensor:
    """Queries [num_tokens, num_heads, dim]; in a decode one for each row, its last one."""
    if is_decode:
        return _decode(query, store, meta, options)
    return kernels.prefill(
        query, store.key, store.value, meta.block_tables, meta.context_lengths, meta.query_starts,
        meta.query_lengths, residuals=meta.residuals, **options,
    )  # fmt: skip


def _decode(query: Tensor, store: LayerStore | NewBlocks, meta: Step, options: dict[str, Any]) -> Tensor:
    """Rows that read the same blocks first are told to the kernel, run by run."""

    def attend(query: Tensor, tables: Tensor, lengths: Tensor, residuals: Tensor | None, shared_blocks: int) -> Tensor:
        return kernels.decode(
            query, store.key, store.value, tables, lengths, residuals=residuals, shared_blocks=shared_blocks, **options
        )

    tables, lengths, residuals = meta.block_tables, meta.context_lengths, meta.residuals
    if len(meta.shared) < 2:  # as a rule: views of all rows would cost every layer a few operations
        return attend(query, tables, lengths, residuals, meta.shared[0].blocks if meta.shared else 0)
    parts = []
    for run in meta.shared:
        rows = slice(run.start, run.stop)
        own = None if residuals is None else residuals[rows]
        parts.append(attend(query[rows], tables[rows], lengths[rows], own, run.blocks))
    return torch.cat(parts)


def _heeded(module: nn.Module, softcap: float | None, sinks: Tensor | None) -> tuple[float | None, Tensor | None]:
    """Soft cap and sinks as far as the model's own implementation heeds them: the tokens shall be the same."""
    if (softcap is None and sinks is None) or origin(module.config, beyond_sdpa=True) != "sdpa":
        return softcap, sinks
    return (softcap if compat.sdpa_knows_softcap() else None), None


def _first_prefill(module: nn.Module, step: LayerStep, query: Tensor, scale: float) -> Tensor:
    """Nothing was stored before: transformers' own causal attention over the new keys, padding cut off row by row."""
    sdpa = compat.own_attention_function("sdpa", module)
    key, value, kept = step.key, step.value, step.rows.kept
    if kept is None:
        dense: Tensor = sdpa(module, query, key, value, None, scaling=scale, is_causal=True)[0]
        return dense
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    kept = kept[:, -query.shape[2] :]  # in numpy: to ask the step's tensors would wait for their device in every layer
    for row, (start, count) in enumerate(zip(kept.argmax(axis=1).tolist(), kept.sum(axis=1).tolist(), strict=True)):
        span = slice(start, start + count)
        if count:
            own = (slice(row, row + 1), slice(None), span)
            out[row, span] = sdpa(module, query[own], key[own], value[own], None, scaling=scale, is_causal=True)[0][0]
    return out


def _dense(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention, with the mask that it would have had."""
    beyond_sdpa = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    name = origin(module.config, beyond_sdpa=beyond_sdpa) if hasattr(module, "config") else "sdpa"
    key, value = (t.dense() if isinstance(t, LazyKV) else t for t in (key, value))
    mask = mask.for_attention(name) if isinstance(mask, LazyMask) else mask
    if kwargs["scaling"] is None:  # not given: the function's own default holds
        del kwargs["scaling"]
    result: tuple[Tensor, Tensor | None] = compat.own_attention_function(name, module)(
        module, query, key, value, mask, **kwargs
    )
    return result


def _count(reason: str, module: nn.Module) -> None:
    if reason not in dense_calls:
        logger.warning("%s: %s: attention over the gathered, dense view (said once)", type(module).__name__, reason)
    dense_calls[reason] = dense_calls.get(reason, 0) + 1
