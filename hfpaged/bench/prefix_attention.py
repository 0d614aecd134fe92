"""Row attention: a step's decode attention when all rows begin with the same blocks, read once or for each row."""

from __future__ import annotations

import operator
import statistics
from functools import partial

import torch
from torch import Tensor

from hfpaged.bench.bandwidth import READS, Layer, random_layer, stored_layer
from hfpaged.bench.result import Measured
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.bench.turns import in_pairs
from hfpaged.measure import alternate

CLOSE, CLOSE_IN_16_BITS = 1e-4, 3e-2  # of averages of normal numbers


def measure(setting: Setting, shape: Shape) -> Measured:
    """The value is the ratio of speeds over as many layers as the model has, each with blocks of its own."""
    like = stored_layer(setting)
    block_size = like.key.shape[2]
    shared = shape.prompt // block_size
    tables = _tables(setting, shape, block_size)
    count = setting.text_config.num_hidden_layers
    layers = [random_layer(setting, like, tables, shape.prompt + shape.own) for _ in range(count)]
    runs = {"each": partial(_decode, setting, layers, 0), "once": partial(_decode, setting, layers, shared)}
    times = alternate(runs, max(READS, setting.repeats))
    same = _is_close(runs["each"](), runs["once"]())  # other outputs would give other tokens
    found = in_pairs(times["each"], times["once"], "s", same, of=operator.truediv)
    once, each = (1e3 * statistics.median(times[name]) for name in ("once", "each"))
    note = f"{once:.1f} of {each:.1f} ms for {count} layers, {shared} blocks in common"
    return Measured(found.value, same_tokens=same, note=note, values=found.values)  # none of both is transformers


def _decode(setting: Setting, layers: list[Layer], shared_blocks: int) -> Tensor:
    outputs = [layer.decode(shared_blocks=shared_blocks) for layer in layers]
    setting.synchronize()
    return outputs[-1]


def _tables(setting: Setting, shape: Shape, block_size: int) -> Tensor:
    """[batch, blocks]: the full blocks of the common tokens, then blocks of each row's own, all in random places."""
    shared = shape.prompt // block_size
    own = -(-(shape.prompt + shape.own) // block_size) - shared
    places = torch.randperm(shared + shape.batch * own, dtype=torch.int32, device=setting.device)
    common, rest = places[:shared], places[shared:]
    return torch.cat([common.expand(shape.batch, shared), rest.view(shape.batch, own)], dim=1).contiguous()


def _is_close(first: Tensor, second: Tensor) -> bool:
    allowed = CLOSE if first.dtype == torch.float32 else CLOSE_IN_16_BITS
    return bool((first - second).abs().max() < allowed)
