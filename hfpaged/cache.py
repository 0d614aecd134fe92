"""PagedCache: transformers' cache, kept in blocks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hfpaged import compat, patching
from hfpaged.admission import Admission, Declined, declined
from hfpaged.cache_stats import CacheStats
from hfpaged.config import DEFAULT_BLOCK_SIZE
from hfpaged.content import read_content
from hfpaged.errors import CacheMismatchError, InvalidConfigError, StreamingError, UnsupportedModelError
from hfpaged.explain import Decoder
from hfpaged.kv_format import KVFormat, resolve_format
from hfpaged.kv_pool import KVPool
from hfpaged.layer_groups import group_layers
from hfpaged.pageable import why_refused, windows_of
from hfpaged.paged_layer import PagedLayer
from hfpaged.prefix_report import PrefixReport
from hfpaged.prefix_sharing import are_those_of, begin_batch, root_keys, why_not_shared
from hfpaged.rows import Rows
from hfpaged.state_layer import paged_layer
from hfpaged.step_plan import has_padding, plan_step
from hfpaged.streaming import Streaming
from hfpaged.streaming_support import make_streaming


class PagedCache(DynamicCache):
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
        kv_dtype: "auto" stores what the model computes; "bfloat16", "float16", "float32" convert.
        salt: prefixes are shared only among caches with the same salt, one for each tenant say.
        publish: let later prompts find what this cache computes; without, it only reads what others published.
        prefix_sharing: look prompts up and publish at all.
        window: forget all but the last `window` tokens of each row and its first `sinks` (StreamingLLM, Xiao et al.
            2023, arXiv 2309.17453): texts without end in constant memory. What is released are whole blocks: sinks
            are rounded up to them, and a row keeps up to a block more than its window. Prompts that are longer are
            computed in pieces. No prefix is shared. Layers with a smaller window of their own stay as they are.
        sinks: see `window`. Default: 4, which is enough for most models; without any they lose their way.

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
        kv_dtype: str | torch.dtype | KVFormat = "auto",
        salt: str | None = None,
        publish: bool = True,
        prefix_sharing: bool = True,
        window: int | None = None,
        sinks: int | None = None,
    ) -> None:
        config = _config_of(model, config)
        self._is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        if model is not None and self._is_encoder_decoder:
            raise UnsupportedModelError(compat.WRAP)
        refusal = why_refused(config, None if model is None else type(compat.transformers_model(model)))
        if refusal is not None:
            raise UnsupportedModelError(refusal.reason)
        layers = compat.default_layers(config)
        windows = windows_of(config, layers)
        if pool is None:
            pool = KVPool(
                group_layers(windows), block_size=block_size, kv_format=resolve_format(kv_dtype),
                memory=memory, num_blocks=num_blocks,
            )  # fmt: skip
        elif (memory, num_blocks) != (None, None):
            raise InvalidConfigError("pool= brings its own size; leave memory= and num_blocks= out")
        elif pool.groups != group_layers(windows):
            raise CacheMismatchError(
                f"the pool was made for layer groups {pool.groups}, this model has {group_layers(windows)}: "
                "caches on one pool must be of one model"
            )
        if salt is not None and not isinstance(salt, str):
            raise InvalidConfigError(f"salt={salt!r} is no text; give a str that others do not know, or None")
        self.salt, self._shares_prefixes = salt, prefix_sharing
        self._adopt(Rows(pool, publish), layers)
        self._streaming = make_streaming(model, pool.groups, self._has_state, pool.block_size, window, sinks)
        self._rows.rules = self._streaming.rules if self._streaming else None
        if model is not None:
            with pool.changing():
                pool.models.add(model)
            patching.patch(model)

    def _adopt(self, rows: Rows, layers: list[Any]) -> None:
        """Put paged layers in the places of the pageable ones; the others stay transformers' own."""
        for group_index, group in enumerate(rows.pool.groups):
            for place, index in enumerate(group.layers):
                layers[index] = paged_layer(rows, group_index, place, layers[index])
        Cache.__init__(self, layers=layers)
        self._rows = rows
        self._has_state = any(map(compat.keeps_state, self._own_layers))
        self._admission: Admission | Declined | None = None
        self._may_have_changed = False  # whether the weights may be others than those of the stored keys
        self._is_beside = False  # computes a part of a prompt for another cache
        self._streaming = None
        # Layers hold the rows, not the cache, so that a dropped cache dies at once and its blocks come back.
        self._finalizer = weakref.finalize(self, rows.abandon)

    @property
    def pool(self) -> KVPool:
        """The block pool, to share with other caches of this model."""
        return self._rows.pool

    @property
    def _own_layers(self) -> list[Any]:
        return [own for layer in self.layers if (own := _own(layer)) is not None]

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
        self._may_have_changed = True

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
            left = self._forget(self._streaming, inputs, model)
        else:
            left = self._share(inputs, model, not (stores_padding and has_padding(inputs)))
        plan = plan_step(self._rows, left or inputs)
        if self._streaming:
            self._streaming.announce(self._rows, plan, left or inputs)
        self._rows.expect(replace(plan, kept=None) if plan and stores_padding else plan)
        return left

    def _forget(self, streaming: Streaming, inputs: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any] | None:
        """Let go of what this step and all later ones do not see; all of a long prompt but its end is computed."""
        if not self._rows.length:
            self._admission = declined(_FORGETS, inputs)
        return streaming.prepare(self, self._rows, model, inputs)

    def _share(self, inputs: Mapping[str, Any], model: PreTrainedModel, may_share: bool) -> dict[str, Any] | None:
        """Let empty rows begin with what is known of their prompts, and note what tokens the step brings."""
        if not self._shares_prefixes:
            return None
        rows, tokens = self._rows, self._rows.tokens
        content = None if self._has_state or not may_share else read_content(inputs)
        if self._has_state:
            reason: str | None = _OWN_STATE
        else:
            reason = why_not_shared(model, inputs, content) if may_share else _STORED_PADDING
        left = None
        if not rows.length:
            tokens.root = None
            self._admission = declined(reason, inputs) if reason else None
        if content is None or (tokens.root is None and rows.length) or reason:
            content = None
        elif not rows.length:
            rows.free()  # rows without a token bind nobody to their number
            left, self._admission = begin_batch(self, rows, model, inputs, content)
            content = read_content(left) if left else content
            self._count_once()
        elif tokens.root and (self._may_have_changed or tokens.is_due_after(content.shape[1])):
            content = content if are_those_of(root_keys(model, self.salt), tokens.root) else None
        self._may_have_changed = False
        tokens.announce(content)
        return left

    def _count_once(self) -> None:
        if isinstance(self._admission, Admission) and not self._is_beside:
            counts = self.pool.prefixes.index.counts
            with self.pool.changing():
                counts.queries += sum(len(items) // self._admission.root.width for items in self._admission.items)
                counts.hits += sum(self._admission.hits)

    def beside(self, *, shares: bool = True) -> tuple[PagedCache, Rows]:
        """An empty cache on the same pool with the same salt, to compute a part of a prompt for this one. It forgets
        nothing, and without `shares` it neither looks up nor publishes.
        """
        child = object.__new__(PagedCache)
        child._is_encoder_decoder, child.salt = self._is_encoder_decoder, self.salt
        child._shares_prefixes = self._shares_prefixes and shares
        child._adopt(Rows(self.pool, self._rows.tokens.publishes), [_own(layer) for layer in self.layers])
        child._is_beside, child._rows.records_past = True, True
        for new, old in zip(child.layers, self.layers, strict=True):
            if isinstance(new, PagedLayer):
                new.share_store(old)
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
        for index in list(self._rows.uncopied):
            self.layers[index].make_copies()  # a copied block must be whole in every layer, whatever the step did
        self._rows.rollback()

    def _undo_interrupted(self) -> None:
        """A forward that began and never ended was broken by Ctrl-C."""
        if self._rows.in_forward:
            self.end_step(completed=False)

    def stats(self) -> CacheStats:
        """What the pool of this cache holds now, all caches on it together."""
        return self.pool.stats()

    def explain_last(self, tokenizer: Decoder | None = None) -> list[PrefixReport]:
        """For each row of the last batch that began with this cache: how much of its prompt was known when it came,
        and why no more. Texts are shown with a `tokenizer`, or anything that has `decode`.
        """
        if self._admission is None and self._rows.batch:
            row = PrefixReport(self._rows.length, 0, 0, "declined", self.pool.block_size, declined=_NOT_TOLD)
            return [row] * self._rows.batch
        return [] if self._admission is None else self._admission.explain(self.pool, tokenizer)

    def free(self) -> None:
        """Give all blocks back. The cache is empty and can be used again."""
        self._rows.free()
        for layer in self._own_layers:
            layer.reset()

    reset = free

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: tables are forked, nothing is copied."""
        self._select(beam_idx)
        for layer in self._own_layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (numbers, or a bool mask over the rows)."""
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)
        for layer in self._own_layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side; the blocks are shared."""
        self._rows.select([row for row in range(self._rows.batch) for _ in range(repeats)])
        for layer in self._own_layers:
            layer.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` positions of each row, at most all. What `activate_past_recording` held
        back is let go, by crop(0) too.

        Raises ValueError for a positive number, as transformers does (before 5.18: the length to keep), and
        WindowPassedError where layers with a window do not hold any more what the next token would see.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding before 5.18 gives a tensor
        length = self._rows.length + tokens_to_remove
        if tokens_to_remove > 0:
            if not compat.positive_crop_is_length():
                raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
            length = tokens_to_remove
        if tokens_to_remove:
            self._rows.truncate(max(length, 0))
        self._rows.release_left(recorded=True)
        for layer in self._own_layers:
            layer.crop(tokens_to_remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork: it shares all blocks, and copies one only when either of the two writes into it."""
        import copy

        self._undo_interrupted()
        child = object.__new__(PagedCache)
        memo[id(self)] = child
        child._is_encoder_decoder, child.salt = self._is_encoder_decoder, self.salt
        child._shares_prefixes = self._shares_prefixes
        own = [copy.deepcopy(_own(layer), memo) for layer in self.layers]
        child._adopt(self._rows.fork(), own)
        child._admission = self._admission
        child._streaming = self._streaming.fork() if self._streaming else None
        for new, old in zip(child.layers, self.layers, strict=True):
            if isinstance(new, PagedLayer):
                new.share_store(old)
        return child

    def __repr__(self) -> str:
        rows = self._rows
        return f"PagedCache(rows={rows.batch}, length={rows.length}, layers={len(self.layers)}, pool={self.pool})"

    def _select(self, indices: Tensor) -> None:
        if self._rows.length:
            self._rows.select(indices.tolist())


_FORGETS = "a cache with window=, which forgets: what it stores depends on what it has forgotten"
_OWN_STATE = "layers with a state of their own, recurrent ones say, which does not lie in blocks"
_STORED_PADDING = "a model whose attention looks at padding, which is stored for it"
_NOT_TOLD = "no patched model told this cache its tokens; make it of a model, PagedCache(model), not of a config"


def _own(layer: Any) -> Any | None:
    """What of a layer is transformers' own: all of it, the state beside paged keys and values, or nothing."""
    return layer.own if isinstance(layer, PagedLayer) else layer


def _config_of(model: nn.Module | None, config: PreTrainedConfig | None) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        raise InvalidConfigError("PagedCache was given a config in the place of a model; write PagedCache(config=...)")
    if (model is None) == (config is None):
        raise InvalidConfigError("PagedCache needs either a model or config=model.config, and not both")
    return config if model is None else compat.transformers_model(model).config
