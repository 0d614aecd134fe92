"""Switching a model's attention to ours, and back."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hfpaged import adapters, attention_origin, compat, generation_watch
from hfpaged.attention import paged_attention
from hfpaged.attention_code import stores_padding, switchable_configs
from hfpaged.errors import UnsupportedModelError
from hfpaged.mask import paged_mask
from hfpaged.prepack import is_prepacked, unprepack
from hfpaged.prepack import prepack as prepack_weights
from hfpaged.same_tokens import check_ranks


@dataclass
class _Patch:
    """What has to be undone."""

    hooks: list[RemovableHandle] = field(default_factory=list)
    configs: list[Any] = field(default_factory=list)
    is_default: bool = False


Model = TypeVar("Model", bound=nn.Module)
_patches: weakref.WeakKeyDictionary[PreTrainedModel, _Patch] = weakref.WeakKeyDictionary()


def is_patched(model: Model) -> bool:
    return compat.transformers_model(model) in _patches


def is_default(model: PreTrainedModel) -> bool:
    """Whether generate() of this model makes a PagedCache where it is given none."""
    return model in _patches and _patches[model].is_default


def patch(model: Model, *, default: bool = False, prepack: bool = False) -> Model:
    """Switch the attention of `model` to the paged kernels; returns the model. A second call is no error.

    A model that PEFT or torch.compile has wrapped is one with the model inside: to patch either patches both.

    With any other cache, or none, a patched model computes what it did before. Models whose attention does not go
    through transformers' registry keep their own and get dense views from the cache.

    Args:
        default: also give every `generate()` of this model that names no cache a PagedCache on a pool of the
            model's own: for pipelines, trainers and other people's code. `unpatch` ends it.

    Raises UnsupportedModelError for what is and holds no model of transformers, and with `default` for models that a
    bare PagedCache cannot serve.
    """
    inner = compat.transformers_model(model)
    was_patched = inner in _patches
    if not was_patched:
        _patches[inner] = _install(inner)
    if default and not _patches[inner].is_default:
        try:
            _make_default(inner)
        except UnsupportedModelError:
            if not was_patched:
                unpatch(model)
            raise
        _patches[inner].is_default = True
    if prepack:
        prepack_weights(model)
    return model


def unpatch(model: Model) -> Model:
    """Give `model` its own attention back; returns the model. Of an unpatched model it is no error."""
    inner = compat.transformers_model(model)
    done = _patches.pop(inner, None)
    if done is not None:
        for hook in done.hooks:
            hook.remove()
        for config in done.configs:
            name = attention_origin.forget(config)
            if name is not None:
                compat.set_attention(config, name)
        if done.is_default:
            del inner._prepare_cache_for_generation
    unprepack(inner)
    return model


@contextmanager
def patched(model: Model, *, default: bool = False, prepack: bool = False) -> Iterator[Model]:
    """`with patched(model): ...` leaves the model as it was before."""
    was_patched, was_prepacked = is_patched(model), is_prepacked(model)
    patch(model, default=default, prepack=prepack)
    try:
        yield model
    finally:
        if not was_patched:
            unpatch(model)
        elif prepack and not was_prepacked:
            unprepack(model)


def _install(model: PreTrainedModel) -> _Patch:
    done = _Patch()
    keeps_padding = stores_padding(model)
    compat.register_attention(paged_attention, paged_mask)
    for config in switchable_configs(model):
        attention_origin.remember(config)
        compat.set_attention(config, compat.patched_name(attention_origin.origin(config)))
        done.configs.append(config)
    names = tuple(inspect.signature(model.forward).parameters)
    before = functools.partial(_before_forward, names, keeps_padding)
    done.hooks.append(model.register_forward_pre_hook(before, with_kwargs=True))
    done.hooks.append(model.register_forward_hook(_AfterForward(names), with_kwargs=True, always_call=True))
    return done


def _paged_cache(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The PagedCache of a forward call, or None, and all its arguments by name."""
    from hfpaged.cache import PagedCache

    named = dict(zip(names, args, strict=False)) | kwargs
    cache = named.get("cache", named.get("past_key_values"))
    return (cache if isinstance(cache, PagedCache) else None), named


@torch.compiler.disable
def _before_forward(
    names: tuple[str, ...], keeps_padding: bool, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tells the cache what comes; the forward gets what of it is not known yet."""
    cache, named = _paged_cache(names, args, kwargs)
    if cache is None:
        return None
    by_row = adapters.row_adapters(module)  # equal rows under different adapters have different keys
    named = named if by_row is None else named | {"adapter_names": by_row}
    call = generation_watch.current()
    if call is not None:
        call.forward_begins(cache)
    check_ranks(cache, module, named)
    left = cache.expect(named, module, stores_padding=keeps_padding)
    return None if left is None else ((), left)


class _AfterForward:
    """A forward that raised leaves the cache as it was before it. After Ctrl-C torch calls no hook: the cache then
    goes back when it is used next.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    @torch.compiler.disable
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache, _ = _paged_cache(self._names, args, kwargs)
        if cache is not None:
            cache.end_step(completed=output is not None)
            call = generation_watch.current()
            if call is not None and output is not None:
                call.forward_ended(cache)


def _make_default(model: PreTrainedModel) -> None:
    """Shadow the one method in which generate() makes its cache."""
    from hfpaged.cache import PagedCache

    pool = PagedCache(model).pool  # at once, so that a model that cannot be paged is refused here
    prepare = model._prepare_cache_for_generation
    name = compat.cache_argument()

    @functools.wraps(prepare)
    def prepare_paged(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        chosen = model_kwargs.get(name) is not None or generation_config.cache_implementation is not None
        if not chosen and generation_config.use_cache is not False:
            model_kwargs[name] = PagedCache(model, pool=pool)
        return prepare(generation_config, model_kwargs, *args, **kwargs)

    model._prepare_cache_for_generation = prepare_paged
