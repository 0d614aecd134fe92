"""The new keys and values of a first forward as blocks that kernels read, for pools that store them otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hfpaged.layer_step import LayerStep, flat_tokens
from hfpaged.step import Step


class NewBlocks(NamedTuple):
    """[num_blocks, num_kv_heads, block_size, dim] each, in the dtype that the model computes."""

    key: Tensor
    value: Tensor


def new_blocks(step: LayerStep) -> tuple[NewBlocks, Step]:
    """Blocks of the new tokens alone, and the step that reads them in the place of the stored ones."""
    meta, size = step.step, step.rows.pool.block_size
    count = -(-step.key.shape[2] // size)
    places = meta.query_starts.long()[:, None] + torch.arange(count * size, device=meta.query_starts.device)
    places.clamp_(max=step.key.shape[0] * step.key.shape[2] - 1)  # behind the end of a row: never read
    blocks = NewBlocks(*(_in_blocks(flat_tokens(states.detach()), places, size) for states in (step.key, step.value)))
    tables = torch.arange(meta.num_seqs * count, dtype=torch.int32, device=places.device).view(meta.num_seqs, count)
    return blocks, replace(
        meta, block_tables=tables, context_lengths=meta.query_lengths, residuals=None, filling=None, shared=()
    )  # fmt: skip


def _in_blocks(tokens: Tensor, places: Tensor, size: int) -> Tensor:
    """`places` [num_seqs, blocks * size] of tokens [num_tokens, num_kv_heads, dim]."""
    return tokens[places.reshape(-1, size)].transpose(1, 2).contiguous()
