"""Tiny models with PEFT adapters that change the tokens, and what generate() says under each of them."""

from __future__ import annotations

import contextlib
import functools

import tiny_models
import torch
from peft import LoraConfig, TaskType, get_peft_model

BASE = "__base__"
LORA = {
    "first": {"target_modules": ["q_proj", "v_proj"]},
    "second": {"target_modules": ["q_proj", "k_proj", "down_proj"], "r": 2},
    "third": {"target_modules": ["o_proj", "up_proj"], "lora_alpha": 3, "use_rslora": True},
}


def lora(**settings):
    return LoraConfig(**{"r": 4, "lora_alpha": 4, "task_type": TaskType.CAUSAL_LM} | settings)


def with_large_adapters(model, std=0.3):
    """Adapters start as zeros; these change the tokens."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "modules_to_save", "vera_lambda", "trainable_tokens")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model.eval().requires_grad_(False)


def make(configs=LORA, name="llama", **changes):
    """A fresh model in PEFT's wrapper; `configs` by adapter are PEFT's, or settings of a LoraConfig. The first one is
    active.
    """
    model = tiny_models.make(name, **changes)
    for adapter, config in configs.items():
        config = lora(**config) if isinstance(config, dict) else config
        if hasattr(model, "peft_config"):
            model.add_adapter(adapter, config)
        else:
            model = get_peft_model(model, config, adapter_name=adapter)
    return with_large_adapters(model)


@contextlib.contextmanager
def under(model, adapter):
    """What a user does: the adapter is set, and afterwards the one from before."""
    before, of_wrapper = model.base_model.active_adapter, model.active_adapter
    if adapter == BASE:
        with model.disable_adapter():
            yield
        return
    if adapter is not None:
        model.set_adapter(adapter)
    try:
        yield
    finally:
        model.base_model.set_adapter(before)
        model.active_adapter = of_wrapper
        model.requires_grad_(False)


class Judge:
    """The tokens of generate() under each adapter, on a model of its own that nobody patches."""

    def __init__(self, model):
        self.model = model
        self._known = {}

    def tokens(self, prompt, adapter, **settings):
        """The new tokens of each sequence that generate() returns."""
        key = (tuple(prompt), adapter, repr(sorted(settings.items())))
        if key not in self._known:
            ids = torch.tensor([prompt])
            with under(self.model, adapter):
                out = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
            self._known[key] = out[:, len(prompt) :].tolist()
        return self._known[key]


@functools.cache
def judge():
    """Of `make()`."""
    return Judge(make())
