"""Prefix sharing inside of a model's forward: by what keys a prompt is found, and when it may be."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hfpaged import adapters, compat, pictures
from hfpaged.admission import Admission, Declined, Inputs, Prompts, cut_inputs, declined
from hfpaged.block_hash import ExtraKey, salt_key
from hfpaged.content import WIDE, Bools, Content, has_plain_positions
from hfpaged.errors import OutOfBlocksError
from hfpaged.fingerprint import has_hidden_weights, hook_keys, model_keys
from hfpaged.prefix_block import Root
from hfpaged.rows import Rows
from hfpaged.spread import input_device
from hfpaged.tensor_parallel import rank_keys

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache

# What one more forward costs, in prompt tokens that could be computed in its time.
FORWARD_COST = 32
FORWARD_COST_ON_GPU = 512
NEVER = 10**12


def root_keys(model: PreTrainedModel, salt: str | None) -> tuple[ExtraKey, ...]:
    """All that decides about keys besides the inputs: weights, devices, rank, adapters, autocast, and for whom."""
    keys = [*model_keys(model), *rank_keys(model), *hook_keys(model)]
    keys += [ExtraKey("adapter", name) for name in adapters.active_adapters(model)]
    scales = adapters.adapter_scales(model)
    keys += [] if scales is None else [ExtraKey("adapter scales", hashlib.sha256(scales.encode()).hexdigest())]
    device = input_device(model).type
    if torch.is_autocast_enabled(device):
        keys.append(ExtraKey("autocast", str(torch.get_autocast_dtype(device))))
    if salt is not None:
        keys.append(salt_key(salt))
    return tuple(keys)


def are_those_of(keys: tuple[ExtraKey, ...], root: Root) -> bool:
    """Whether a forward under `keys` computes what is found under `root`: no key is new and none is missing."""
    beside = [key for key in root.keys if key.kind != "width" and not key.kind.startswith("input:")]
    return sorted(keys) == sorted(beside)


def why_not_shared(model: PreTrainedModel, inputs: Inputs, content: Content | None) -> str | None:
    """Why nothing of this forward may be known to others; None where it may."""
    if content is None:
        return "inputs that cannot be compared"
    others = pictures.input_names(content)
    if others and not pictures.can_be_known(model, others):
        return f"inputs that have no place among the tokens: {', '.join(others)}"
    if torch.is_grad_enabled() or model.training:
        return "gradients, or a model in training mode"
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "an attention mask that is not [batch, length]"
    # A decode step, which is asked all this for each token, is no long prompt.
    longest = compat.longest_with_same_positions(model.config) if content.shape[1] > 1 else None
    if longest is not None and content.shape[1] > longest:
        return f"rotary positions that change for all tokens of a prompt longer than {longest}"
    return None


def why_whole(inputs: Inputs, config: PreTrainedConfig) -> str | None:
    """Why a prompt that is known must be computed again; None where it need not be."""
    keep = inputs.get("logits_to_keep")
    if not isinstance(keep, int) or keep < 1:
        return "the caller may read the logits of the whole prompt: no logits_to_keep"
    names = ("output_hidden_states", "output_attentions", "labels")
    wanted = (inputs.get(name, getattr(config, name, None)) for name in names)
    if any(given is not None and given is not False for given in wanted):
        return "the caller asked for hidden states, attentions or the loss of the whole prompt"
    return None


def begin_batch(
    cache: PagedCache, rows: Rows, model: PreTrainedModel, inputs: Inputs, content: Content
) -> tuple[dict[str, Any] | None, Admission | Declined]:
    """The first forward of a batch: let its rows begin with what is known. Returns (the inputs that are left to be
    computed, None for all of them; what was found, or why nothing was looked up).
    """
    kept, is_left = _kept_columns(inputs, content)
    if not is_left:
        return None, declined("padding that is not on the left", inputs)
    if has_hidden_weights(model):
        return None, declined("weights that nobody can read: no fingerprint would see them change", inputs)
    is_plain = not content.by_position and has_plain_positions(content, kept, [0] * content.shape[0])
    if not is_plain and content.positions is None:
        # A token's place depends on its neighbours' length.
        return None, declined("padding, which this model counts as places", inputs)
    root = rows.pool.prefixes.index.root((*root_keys(model, cache.salt), *content.keys), 1 if is_plain else WIDE)
    rows.tokens.root = root
    whole = why_whole(inputs, model.config)
    if whole is not None:
        return None, declined(whole, inputs)
    rows.pool.settle_idle()
    prompts = Prompts(rows, root, content, kept, int(inputs["logits_to_keep"]))
    admission = Admission(root, prompts.items, prompts.matches, prompts.ends)
    try:
        pieces = _Pieces(cache, model, inputs, content, prompts.lengths)
        tail = _tail(model, content, prompts, pieces)
        length, cuts = prompts.attach(tail, exactly=bool(pictures.input_names(content)))
    except OutOfBlocksError:
        return None, admission  # what was found takes the room that the whole would need; pieces have let go of theirs
    finally:
        prompts.close()
    known = [match.length(rows.pool.block_size) for match in prompts.matches]
    admission.hits = [min(cut, have) for cut, have in zip(cuts, known, strict=True)]
    if not length:
        return None, admission
    left = cut_inputs(inputs, content, slice(None), slice(length, None))
    return pictures.without(left), admission


def _tail(model: PreTrainedModel, content: Content, prompts: Prompts, pieces: _Pieces) -> int:
    """How many columns are left for all rows, after what pays has been computed for single rows."""
    if not pictures.input_names(content):
        cost = FORWARD_COST if input_device(model).type == "cpu" else FORWARD_COST_ON_GPU
        return prompts.compute_pieces(pieces.forward, cost)
    tail = prompts.compute_pieces(_no_piece, NEVER)  # pictures belong to the batch, not to rows that are known here
    known = [(items, max(length - tail, 0)) for items, length in zip(prompts.items, prompts.lengths, strict=True)]
    return tail if pictures.are_all_before(model, known, prompts.width) else content.shape[1]


def _no_piece(row: int, stop: int) -> Rows:
    raise AssertionError("no plan pays for a piece at this price")


class _Pieces:
    """Forwards of single rows on caches of their own, beside the batch that they are for."""

    def __init__(
        self, cache: PagedCache, model: PreTrainedModel, inputs: Inputs, content: Content, lengths: list[int]
    ) -> None:
        self._cache, self._model, self._inputs, self._content, self._lengths = cache, model, inputs, content, lengths
        self._alive: list[PagedCache] = []  # the blocks of a cache that nobody holds go back

    def forward(self, row: int, stop: int) -> Rows:
        """Compute the first `stop` tokens of a row; the rows that hold them."""
        first = self._content.shape[1] - self._lengths[row]
        columns = slice(first, first + stop)
        inputs = cut_inputs(self._inputs, self._content, slice(row, row + 1), columns)
        beside, rows = self._cache.beside()
        self._alive.append(beside)
        mask = self._inputs.get("attention_mask")
        names = {
            "attention_mask": None if mask is None else mask[row : row + 1, columns],
            "logits_to_keep": 1,
            compat.cache_argument(): beside,
        }
        self._model(**_without_cache(inputs) | names)
        return rows


def _without_cache(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given for name, given in inputs.items() if name not in ("cache", "past_key_values")}


def _kept_columns(inputs: Inputs, content: Content) -> tuple[Bools | None, bool]:
    """(what of [batch, length] is no padding, None for all of it; whether padding is on the left only)."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return None, True
    if tuple(mask.shape) != content.shape:
        return None, False
    kept = mask.cpu().numpy().astype(bool)
    is_left = bool((kept[:, 1:] >= kept[:, :-1]).all() and kept[:, -1].all())
    return (None if kept.all() else kept), is_left
