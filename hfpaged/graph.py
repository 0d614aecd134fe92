"""Where autograd meets the pool: the keys of the step under way keep their graph, those of earlier steps have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfpaged.errors import AutogradError


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, new: Tensor) -> Tensor:
        ctx.length = new.shape[2]
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        if ctx.needs_input_grad[0]:
            raise AutogradError(
                "the loss depends on keys of an earlier forward, which lie in the pool without their graph; compute "
                "the whole sequence in one forward, the earlier part under torch.no_grad(), or use DynamicCache"
            )
        return None, gradient[:, :, gradient.shape[2] - ctx.length :]


def with_graph(full: Tensor, new: Tensor, past_had_graph: bool) -> Tensor:
    """`full` [batch, heads, length, dim] as read from the pool; gradients of its last positions go to `new`.

    A gradient for the positions before raises AutogradError where it would have been lost.
    """
    joined: Tensor = _Stored.apply(full.requires_grad_(past_had_graph), new)
    return joined
