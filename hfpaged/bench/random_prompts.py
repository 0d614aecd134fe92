"""Prompts of random tokens, always the same ones: how fast a model computes does not depend on their sense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfpaged.bench.setting import Setting

SEED = 20


def random_ids(setting: Setting, batch: int, length: int) -> Tensor:
    """[batch, length] on the model's device, without the tokens that mean something to generate() or the model."""
    special = _special_ids(setting)
    allowed = torch.tensor([token for token in range(setting.text_config.vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(SEED)
    return allowed[torch.randint(len(allowed), (batch, length), generator=generator)].to(setting.device)


def random_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """`count` lengths, both ends included."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each [batch, longest row]."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    return ids.to(device), mask.to(device)


def _special_ids(setting: Setting) -> set[int]:
    settings = {**setting.text_config.to_dict(), **setting.model.config.to_dict()}
    settings |= setting.model.generation_config.to_dict()
    found = [value for name, value in settings.items() if name.endswith("_token_id")]
    return {token for value in found for token in (value if isinstance(value, list) else [value]) if token is not None}
