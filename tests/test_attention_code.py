"""What is read from the source of attention modules."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpaged.attention_code import AttentionCode, attention_code, stores_padding, switchable_configs


def eager(*given):
    return given


class Plain(nn.Module):
    def forward(self, q, k, v, attention_mask, cache, **kwargs):
        k = k.transpose(1, 2)
        k, v = cache.update(k, v, 0, kwargs=kwargs)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attention_interface(self, q, k, v, attention_mask, scaling=1.0)
        return out


class Expands(nn.Module):
    def forward(self, q, k, v, attention_mask, cache, **kwargs):
        k, v = cache.update(k, v, 0)
        k = k.repeat(1, 2, 1, 1)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attention_interface(self, q, k, v, attention_mask)


class OwnCode(nn.Module):
    def forward(self, q, k, v, attention_mask, cache):
        k, v = cache.update(k, v, 0)
        return (q @ k.transpose(2, 3) + attention_mask).softmax(-1) @ v


class OwnMask(nn.Module):
    def forward(self, q, k, v, attention_mask, cache):
        k, v = cache.update(k, v, 0)
        mask = attention_mask * 2
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attention_interface(self, q, k, v, attention_mask=mask)


class MaskOfMany(nn.Module):
    def forward(self, q, k, v, masks, cache):
        mask = (masks or {}).get("causal")
        k, v = cache.update(k, v, 0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attention_interface(self, q, k, v, mask)


class Biased(nn.Module):
    def forward(self, q, k, v, attention_mask, cache):
        k, v = cache.update(k, v, 0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attention_interface(self, q, k, v, attention_mask, position_bias=self.bias)


class Named(nn.Module):
    def forward(self, q, k, v, attention_mask, cache):
        k, v = cache.update(k, v, 0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        if self.config._attn_implementation in ("eager", "sdpa"):
            attention_mask = self.choose(attention_mask)
        return attention_interface(self, q, k, v, attention_mask)


class NoCache(nn.Module):
    def forward(self, q, k, v, found):
        found.update(q)
        return q @ k @ v


FAST = AttentionCode(reaches_registry=True, hands_over=True, keeps_mask=True)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (Plain, FAST),
        (MaskOfMany, FAST),
        (Expands, AttentionCode(True, False, True)),
        (OwnCode, AttentionCode()),
        (OwnMask, AttentionCode(True, True, False, makes_mask=True)),
        (Biased, AttentionCode(True, True, False)),
        (Named, AttentionCode(True, True, False, makes_mask=True, heeds_name=True)),
        (NoCache, None),
        (nn.Linear, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_source_tells(cls, code):
    assert attention_code(cls) == code


def test_a_class_without_source_is_not_known():
    made = type("Made", (nn.Module,), {"forward": eval("lambda self, cache: cache.update(1, 2, 3)")})
    assert attention_code(made) is None


@pytest.mark.parametrize(
    ("model_type", "is_switched", "keeps"),
    [
        ("llama", True, False),
        ("falcon", False, True),
        ("prophetnet", False, True),
        ("deepseek_v32", False, True),
        ("doge", False, True),
    ],
)
def test_only_switched_attention_does_without_the_keys_of_padding(model_type, is_switched, keeps):
    from family_models import build

    model = build(model_type)
    assert bool(switchable_configs(model)) == is_switched
    assert stores_padding(model) == keeps


def test_the_text_model_inside_of_another_is_switched_alone():
    """GOT-OCR 2 has attention code of its own for pictures, and Qwen2 for text."""
    from family_models import build

    model = build("got_ocr2")
    assert [config.model_type for config in switchable_configs(model)] == ["qwen2"]
    assert not stores_padding(model)
