"""PagedCache: transformers' cache, kept in blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpaged import compat, patching
from hfpaged.cache_pool import PoolSpec, check_pageable, config_of, is_encoder_decoder, pool_for
from hfpaged.config import DEFAULT_BLOCK_SIZE, DEFAULT_STORE_SIZE
from hfpaged.errors import CacheMismatchError, InvalidConfigError, StreamingError, UnsupportedModelError
from hfpaged.explain import Decoder
from hfpaged.kv_format import Spec
from hfpaged.kv_pool import KVPool
from hfpaged.kv_scales import KVScales
from hfpaged.layer_groups import group_layers
from hfpaged.pageable import windows_of
from hfpaged.prefix_lookup import PrefixLookup
from hfpaged.prefix_report import PrefixReport
from hfpaged.row_cache import RowCache, own_part
from hfpaged.rows import Rows
from hfpaged.step_plan import has_padding, plan_step
from hfpaged.streaming_support import make_streaming
from hfpaged.tiers_spec import TiersSpec


class PagedCache(RowCache):
    """A drop-in cache for `generate()` whose keys and values lie in blocks of a pool (PagedAttention,
    Kwon et al. 2023, arXiv 2309.06180).

        cache = PagedCache(model)
        model.generate(**inputs, past_key_values=cache)

    Args:
        model: the model that will use the cache, bare or wrapped by PEFT or torch.compile. Its attention is switched
            to our kernels, reversibly (`hfpaged.unpatch(model)`); where that cannot be done it keeps its own and gets
            dense views.
        config: instead of a model: nothing is switched, the cache is right under any attention implementation.
        block_size: tokens per block, a power of two.
        memory: the most the pool may take, bytes or a text such as "2GiB". It grows as needed up to there.
            Default: half of the memory that is free when the first key arrives.
        num_blocks: instead of `memory`, the number of blocks.
        pool: the `pool` of another cache of the same model, to share its blocks.
        kv_dtype: "auto" stores what the model computes; "bfloat16", "float16", "float32" convert; "int8", "fp8_e4m3",
            "fp8_e5m2", "k8v4" (keys int8, values int4) and "int4" quantize (`hfpaged quality` tells what that costs).
            "int8/auto" is for keys and values apart, {"default": "int8", "layers": {0: "auto"}} by layer.
        kv_scales: for fp8, scales by head that `hfpaged quality --calibrate` found: a file, or `KVScales.load(file)`.
        salt: prefixes are shared only among caches with the same salt, one for each tenant say.
        publish: let later prompts find what this cache computes; without, it only reads what others published.
        prefix_sharing: look prompts up and publish at all.
        window: forget all but the last `window` tokens of each row and its first `sinks` (StreamingLLM, Xiao et al.
            2023, arXiv 2309.17453): texts without end in constant memory. What is released are whole blocks: sinks
            are rounded up to them, and a row keeps up to a block more than its window. Prompts that are longer are
            computed in pieces. No prefix is shared. Layers with a smaller window of their own stay as they are.
        debug: poison freed blocks and trace each block, see KVPool; default: as HFPAGED_DEBUG says.
        sinks: see `window`. Default: 4, which is enough for most models; without any they lose their way.
        swap_space: "4GiB" of host memory for evicted prefixes, which come back when that is cheaper than computing.
        prefix_store: a directory of at most `prefix_store_size` bytes, for prefixes that other processes on this
            machine with the same model, formats and salt computed, and for what this one does.

    Raises:
        InvalidConfigError: sizes or dtypes that cannot work.
        UnsupportedModelError: encoder-decoder models, which need the cache wrapped, and models without KV cache;
            with `window` all whose keys cannot be forgotten or moved.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        config: PreTrainedConfig | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        memory: int | str | None = None,
        num_blocks: int | None = None,
        pool: KVPool | None = None,
        kv_dtype: Spec = "auto",
        kv_scales: KVScales | str | os.PathLike[str] | None = None,
        salt: str | None = None,
        publish: bool = True,
        prefix_sharing: bool = True,
        window: int | None = None,
        sinks: int | None = None,
        debug: bool | None = None,
        swap_space: int | str = 0,
        prefix_store: str | os.PathLike[str] | None = None,
        prefix_store_size: int | str = DEFAULT_STORE_SIZE,
    ) -> None:
        config = config_of(model, config)
        self._is_encoder_decoder = is_encoder_decoder(config)
        check_pageable(model, config)
        layers = compat.default_layers(config)
        below = TiersSpec(swap_space, prefix_store, prefix_store_size)
        below.check_shared(prefix_sharing)
        spec = PoolSpec(block_size, memory, num_blocks, kv_dtype, kv_scales, debug, below)
        pool = pool_for(model, config, group_layers(windows_of(config, layers)), pool, spec)
        if salt is not None and not isinstance(salt, str):
            raise InvalidConfigError(f"salt={salt!r} is no text; give a str that others do not know, or None")
        self.salt = salt
        self._adopt(Rows(pool, publish), layers)
        has_state = any(map(compat.keeps_state, self._own_layers))
        self._lookup = PrefixLookup(prefix_sharing, has_state)
        self._streaming = make_streaming(model, pool.groups, has_state, pool.block_size, window, sinks)
        self._rows.rules = self._streaming.rules if self._streaming else None
        if model is not None:
            pool.add_model(model, compat.model_name(compat.transformers_model(model)))
            patching.patch(model)

    @property
    def _is_user_defined(self) -> bool:
        return bool(self.__dict__.get("_is_user_defined", False))

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # generate() sets this on the cache that its user passed: the one moment to see an encoder-decoder that
        # got a bare cache, in which self and cross attention would overwrite each other in silence.
        if self._is_encoder_decoder:
            raise UnsupportedModelError(compat.WRAP)
        self.__dict__["_is_user_defined"] = value
        self._undo_interrupted()
        self._lookup.may_have_changed = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values [batch, num_kv_heads, length, dim] of one layer; returns lazy views of all visible
        ones. Raises CacheMismatchError, OutOfBlocksError (all blocks of this cache come back).
        """
        if layer_idx >= len(self.layers):
            raise CacheMismatchError(
                f"the model asks for layer {layer_idx}, this cache was made for a model of {len(self.layers)} layers; "
                "make a PagedCache for each model"
            )
        if self._streaming and not self._rows.in_forward:
            raise StreamingError(
                "a cache with window= forgets before each forward of the model that it was made for, and this forward "
                "was not announced: call that model itself, not a part of it, and do not unpatch it"
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def expect(
        self, inputs: Mapping[str, Any], model: PreTrainedModel, *, stores_padding: bool = False
    ) -> dict[str, Any] | None:
        """What the next step brings, told before its first key by the arguments of the model's forward: padding,
        which is not stored (unless `stores_padding`), rows that are equal, which are stored once, and tokens that are
        known already. Patched models call it. Returns the arguments of what is left to be computed, None where that
        is everything.

        Raises CacheMismatchError when the mask asks for positions that were padding when they were computed;
        StreamingError.
        """
        self._undo_interrupted()
        self._rows.expect(None)  # whatever the plan says, the step before is over
        if self._streaming:
            self._lookup.decline_forgetting(self._rows, inputs)
            left = self._streaming.prepare(self, self._rows, model, inputs)
        else:
            may_share = not (stores_padding and has_padding(inputs))
            left = self._lookup.begin_step(self, self._rows, model, inputs, may_share)
        plan = plan_step(self._rows, left or inputs)
        if self._streaming:
            self._streaming.announce(self._rows, plan, left or inputs)
        self._rows.expect(replace(plan, kept=None) if plan and stores_padding else plan)
        return left

    def beside(self, *, shares: bool = True) -> tuple[PagedCache, Rows]:
        """An empty cache on the same pool with the same salt, to compute a part of a prompt for this one. It forgets
        nothing, and without `shares` it neither looks up nor publishes.
        """
        child = self._child()
        child._lookup = self._lookup.beside(shares)
        child._adopt(Rows(self.pool, self._rows.tokens.publishes), [own_part(layer) for layer in self.layers])
        child._rows.records_past, child._rows.tokens.origin = True, self._rows.tokens.origin
        child._share_stores(self)
        return child, child._rows

    def end_step(self, completed: bool) -> None:
        """The forward that `expect` announced is over: blocks that left a window go back to the pool. One that was
        not completed is undone.
        """
        if self._streaming:
            self._streaming.end_step(self._rows, completed)
        if completed:
            self._rows.complete()
        else:
            self.abort_step()
        self._rows.in_forward = False

    def abort_step(self) -> None:
        """Go back to before the step under way, after an exception in the middle of a forward."""
        for index in list(self._rows.copies.unmade_in):
            self.layers[index].make_copies()  # a copied block must be whole in every layer, whatever the step did
        self._rows.rollback()

    def _undo_interrupted(self) -> None:
        """A forward that began and never ended was broken by Ctrl-C."""
        if self._rows.in_forward:
            self.end_step(completed=False)

    @property
    def lookup(self) -> PrefixLookup:
        """What was found of the last prompts."""
        return self._lookup

    @property
    def kind(self) -> str:
        """What must be alike in the caches that the ranks of a model make for one batch."""
        pool = self.pool
        return f"{pool.block_size} {pool.kv_format.title} {self._lookup.shares} {self._rows.rules}"

    def explain_last(self, tokenizer: Decoder | None = None) -> list[PrefixReport]:
        """For each row of the last batch that began with this cache: how much of its prompt was known when it came,
        and why no more. Texts are shown with a `tokenizer`, or anything that has `decode`.
        """
        return self._lookup.explain(self._rows, tokenizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork: it shares all blocks, and copies one only when either of the two writes into it."""
        import copy

        self._undo_interrupted()
        child = memo[id(self)] = self._child()
        child._lookup = self._lookup.fork()
        child._streaming = self._streaming.fork() if self._streaming else None
        own = [copy.deepcopy(own_part(layer), memo) for layer in self.layers]
        child._adopt(self._rows.fork(), own)
        child._share_stores(self)
        return child

    def __repr__(self) -> str:
        rows = self._rows
        return f"PagedCache(rows={rows.batch}, length={rows.length}, layers={len(self.layers)}, pool={self.pool})"

    def _child(self) -> PagedCache:
        """A cache for the same model and salt, without rows yet."""
        child = object.__new__(PagedCache)
        child._is_encoder_decoder, child.salt, child._streaming = self._is_encoder_decoder, self.salt, None
        return child
