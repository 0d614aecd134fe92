"""The rule of StreamingLLM written down once more, as the paper has it: keys are kept without positions, and at each
step all of them are rotated by where they stand among those that are kept.
"""

from __future__ import annotations

import sys

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from hfpaged import compat

CACHE = compat.cache_argument()


class PaperLayer(DynamicLayer):
    """Keys and values of `kept` first positions and of those behind the last block edge that the window allows."""

    def __init__(self, kept, window, block_size):
        super().__init__()
        self.kept, self.window, self.block_size, self.seen, self.gone = kept, window, block_size, 0, 0

    def update(self, keys, values, *_, **__):
        edge = (self.seen - self.window + 1) // self.block_size * self.block_size
        count = max(edge - self.kept - self.gone, 0)
        if count:
            places = torch.cat([torch.arange(self.kept), torch.arange(self.kept + count, self.keys.shape[2])])
            self.keys, self.values = self.keys[:, :, places], self.values[:, :, places]
            self.gone += count
        self.seen += keys.shape[2]
        return super().update(keys, values)

    def crop(self, removed):
        if removed:
            self.keys, self.values = self.keys[:, :, :removed], self.values[:, :, :removed]
        self.seen += removed

    def get_seq_length(self):
        return self.seen


def paper_cache(model, window, sinks, block_size):
    """Layers with a window of their own keep all; the mask below tells what they see."""
    kept = -(-sinks // block_size) * block_size
    cache = DynamicCache()
    cache.layers = [
        PaperLayer(kept, window, block_size) if not own or own > 2 * window + kept else PaperLayer(0, 10**9, block_size)
        for own in map(own_window, range(model.config.num_hidden_layers), [model] * model.config.num_hidden_layers)
    ]
    return cache


def own_window(layer, model):
    types = getattr(model.config, "layer_types", None)
    window = getattr(model.config, "sliding_window", None)
    return window if types is None or types[layer] == "sliding_attention" else None


def as_in_the_paper(model, monkeypatch, window):
    """Let `model` rotate its keys late, by their place among those that a `paper_cache` gives it."""
    code = sys.modules[type(model).__module__]
    rotate = code.apply_rotary_pos_emb
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    monkeypatch.setattr(code, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key))

    def attention(module, query, key, value, mask, scaling, softcap=None, s_aux=None, sliding_window=None, **_):
        length, count = key.shape[2], query.shape[2]
        cos, sin = rotary(value, torch.arange(length)[None])
        key = rotate(key, key, cos, sin)[1]
        query = rotate(query, query, cos[:, -count:], sin[:, -count:])[0]
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if sliding_window is not None and sliding_window <= window:
            hidden |= distance >= sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:2], count, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        return (weights @ value).transpose(1, 2), weights

    AttentionInterface.register("paper", attention)
    AttentionMaskInterface.register("paper", lambda **_: None)
    model.config._attn_implementation_internal = "paper"
    return model


@torch.no_grad()
def paper_logits(model, cache, ids, pieces):
    """Logits of the last position of each piece of `ids` [1, length]."""
    logits = [model(part, **{CACHE: cache}).logits[0, -1] for part in ids.split(pieces, dim=1)]
    return torch.stack(logits)
