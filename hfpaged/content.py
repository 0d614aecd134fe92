"""What stands at each position of a forward, as numbers to hash and compare, and what holds for all of them.

Keys and values depend on the token ids, on where they stand, and on whatever else a model is given. Inputs with one
part for each position become part of the numbers; everything else becomes an extra key of the root.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.block_hash import ExtraKey
from hfpaged.errors import InvalidConfigError

Bools = npt.NDArray[np.bool_]

# The token id and the four words of a SHA-256.
WIDE = 5
# What a forward is told that changes no key: what to return, and what is read elsewhere.
_NO_CONTENT = {
    "attention_mask", "cache", "cache_position", "input_ids", "logits_to_keep", "num_logits_to_keep",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_ids",
    "return_dict", "use_cache",
}  # fmt: skip
# What stands beside each token. Other tensors may have a prompt's shape by accident: pictures [1, 3, ...], say.
_BY_POSITION = {"inputs_embeds", "labels", "mm_token_type_ids", "per_layer_inputs", "token_type_ids"}


@dataclass
class Content:
    """The inputs of one forward over `shape` = (batch, length) positions."""

    shape: tuple[int, int]
    token_ids: Tensor | None  # [batch, length]; None for embeddings
    positions: Tensor | None  # [batch, length, any]; None where the model counts by itself
    by_position: dict[str, Tensor]  # [batch, length, ...]
    keys: tuple[ExtraKey, ...]  # all else

    @property
    def width(self) -> int:
        """Numbers for each position, as far as the inputs tell before their values are looked at."""
        return WIDE if self.by_position else 1

    def kept(self) -> Content:
        """A copy: whoever gave the inputs may fill the same tensors anew for the next forward."""
        ids, positions = (
            None if given is None else given.detach().clone() for given in (self.token_ids, self.positions)
        )
        by_position = {name: given.detach().clone() for name, given in self.by_position.items()}
        return Content(self.shape, ids, positions, by_position, self.keys)


def read_content(inputs: Mapping[str, Any]) -> Content | None:
    """What the arguments of a forward, by name, say; None where something in them cannot be compared."""
    ids = inputs.get("input_ids")
    first = ids if isinstance(ids, Tensor) else inputs.get("inputs_embeds")
    if not isinstance(first, Tensor) or first.ndim < 2:
        return None
    shape = (int(first.shape[0]), int(first.shape[1]))
    by_position: dict[str, Tensor] = {}
    keys = []
    for name, given in inputs.items():
        if name in _NO_CONTENT or given is None:
            continue
        if name in _BY_POSITION and isinstance(given, Tensor) and tuple(given.shape[:2]) == shape:
            by_position[name] = given
        else:
            text = _text(given)
            if text is None:
                return None
            keys.append(ExtraKey(f"input:{name}", text))
    positions = _positions(inputs.get("position_ids"), shape)
    return Content(shape, ids if isinstance(ids, Tensor) else None, positions, by_position, tuple(sorted(keys)))


def row_items(content: Content, row: int, kept: Bools | None, past: int, width: int) -> array[int]:
    """`width` numbers for each kept position of `row`, which has `past` tokens before them.

    With `width` 1 the positions must be plain (`has_plain_positions`) and nothing else given by position.
    """
    places = np.arange(content.shape[1]) if kept is None else np.flatnonzero(kept[row])
    items = np.zeros((len(places), width), dtype=np.int64)
    items[:, 0] = -1 if content.token_ids is None else content.token_ids[row].cpu().numpy()[places]
    if width == WIDE:
        parts = [(name, content.by_position[name][row]) for name in sorted(content.by_position)]
        if content.positions is not None and not _is_plain(content.positions[row], places, past):
            parts.append(("position_ids", content.positions[row]))
        for name, part in parts:
            raw = _raw(part)
            kind = f"{name} {part.dtype} {tuple(part.shape[1:])} ".encode()  # equal bytes of two inputs must differ
            for number, place in enumerate(places):
                seen = items[number, 1:].tobytes() + kind + raw[place].tobytes()
                items[number, 1:] = np.frombuffer(hashlib.sha256(seen).digest(), dtype=np.int64)
    flat = array("q")
    flat.frombytes(items.tobytes())
    return flat


def has_plain_positions(content: Content, kept: Bools | None, past: Iterable[int]) -> bool:
    """Whether the kept positions of each row just count on from its `past` tokens."""
    if content.positions is None:
        return kept is None or bool(kept.all())  # a model that counts padding in places tokens by their padding
    places = np.arange(content.shape[1])
    return all(
        _is_plain(positions, places if kept is None else np.flatnonzero(kept[row]), start)
        for row, (positions, start) in enumerate(zip(content.positions, past, strict=True))
    )


def one_prompt(input_ids: Any) -> array[int]:
    """The ids of one prompt: numbers in a row, or a tensor [length] or [1, length]. Raises InvalidConfigError."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidConfigError(
            f"input_ids={input_ids!r:.80} are no token ids; give tokenizer(text)['input_ids']"
        ) from error
    if (ids.numel() and ids.is_floating_point()) or ids.ndim > 2 or (ids.ndim == 2 and len(ids) != 1):
        raise InvalidConfigError(
            f"input_ids of shape {tuple(ids.shape)} and {ids.dtype} are not one prompt; give whole numbers [length] or "
            "[1, length]"
        )
    return array("q", ids.flatten().tolist())


def _positions(given: Any, shape: tuple[int, int]) -> Tensor | None:
    """[batch, length, k] of position ids that come as [batch or 1, length] or [k, batch, length]."""
    if not isinstance(given, Tensor):
        return None
    stacked = given.unsqueeze(-1) if given.ndim == 2 else given.movedim(0, -1)
    return stacked.expand(*shape, stacked.shape[-1])


def _is_plain(positions: Tensor, places: npt.NDArray[np.int64], past: int) -> bool:
    chosen = positions.cpu().numpy()[places]
    return bool((chosen == np.arange(past, past + len(places))[:, None]).all())


def _text(given: Any) -> str | None:
    """The content of an argument as text, hashed where it is long; None for what cannot be told."""
    if isinstance(given, Tensor):
        shape = f"{tuple(given.shape)} {given.dtype} ".encode()
        return hashlib.sha256(shape + _raw(given.reshape(1, -1)).tobytes()).hexdigest()
    if isinstance(given, Mapping):
        text = _text([part for name in sorted(given) for part in (name, given[name])])
        return None if text is None else f"{{{text}}}"
    if given is None:
        return ""
    if isinstance(given, (list, tuple)):
        texts = [_text(part) for part in given]
        return None if None in texts else f"[{','.join(map(str, texts))}]"
    return repr(given) if isinstance(given, (bool, int, float, str)) else None


def _raw(part: Tensor) -> npt.NDArray[np.uint8]:
    """[length, bytes] of a tensor [length, ...]."""
    flat = part.detach().reshape(len(part), -1).contiguous().cpu()
    return flat.view(torch.uint8).numpy()
