"""One forward of a model through a cache."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hfpaged.compat import cache_argument


def forward(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Go on with `ids` [batch, length], without padding; the logits behind the last one, [batch, vocabulary]."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=ids, use_cache=True, **{cache_argument(): cache}, **options)
    logits: Tensor = output.logits[:, -1]
    return logits
