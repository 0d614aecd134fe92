"""Attention sinks: the first tokens of a row, which move along with its window (StreamingLLM, section 3.2)."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hfpaged import compat, pictures
from hfpaged.content import Bools, Content, read_content
from hfpaged.errors import StreamingError
from hfpaged.rows import Rows
from hfpaged.sequence import Sequence
from hfpaged.spread import input_device
from hfpaged.stream_rule import SinkTokens

if TYPE_CHECKING:
    from hfpaged.cache import PagedCache

Spot = tuple[bytes, int, int]  # token ids, position, shift: rows with the same sinks at the same place share them


def read_sinks(rows: Rows, inputs: Mapping[str, Any], kept: Bools | None, count: int) -> list[SinkTokens | None] | None:
    """What the first `count` tokens of each row are when a forward with `inputs` is over; None where all rows know
    theirs. `kept` [batch, query_length] is False for padding. Raises StreamingError where the inputs do not tell.
    """
    if rows.length and all(sequence.sinks and len(sequence.sinks.ids) >= count for sequence in rows.sequences):
        return None
    ids, positions = _read(inputs, rows.length)
    kept = kept if kept is not None and kept.shape == tuple(ids.shape) else None
    known = [sequence.sinks for sequence in rows.sequences] if len(rows.sequences) == len(ids) else [None] * len(ids)
    found = []
    for row, sinks in enumerate(known):
        columns = torch.arange(ids.shape[1]) if kept is None else torch.from_numpy(kept[row].nonzero()[0])
        columns = columns[: count - len(sinks.ids) if sinks else count]
        found.append(_extended(sinks, ids[row, columns].tolist(), positions[row, columns].tolist()))
    return found


def move_sinks(cache: PagedCache, rows: Rows, model: PreTrainedModel) -> None:
    """Bring the keys of the sinks to right before what is left of each row.

    Keys hold their position in them. Those of the sinks are computed anew: they saw nothing but each other, so a
    forward of them alone, with later positions, gives what rotating the keys would, for every kind of rotary position.
    """
    assert rows.rules is not None
    streaming = [group for group, rule in enumerate(rows.rules) if rule]
    spots: dict[Spot, list[Sequence]] = {}
    for sequence in rows.sequences:
        shift = sequence.tables[streaming[0]].first * rows.pool.block_size
        if sequence.sinks and sequence.sinks.shift != shift:
            spots.setdefault((sequence.sinks.ids.tobytes(), sequence.sinks.start, shift), []).append(sequence)
    if not spots:
        return
    beside, computed = cache.beside(shares=False)
    try:
        _forward_sinks(model, beside, [(sequences[0], shift) for (_, _, shift), sequences in spots.items()])
        with rows.pool.changing():
            for (spot, sequences), source in zip(spots.items(), computed.sequences, strict=True):
                for sequence in sequences:
                    _replace(sequence, source, streaming, spot[2])
    finally:
        computed.free()


def others_given(inputs: Mapping[str, Any], content: Content) -> list[str]:
    """Inputs that belong to no single position, by name, but for empty ones: what holds pictures when there are any."""
    return [name for name in pictures.input_names(content) if not _is_empty(inputs[name])]


def _is_empty(given: Any) -> bool:
    parts = given.values() if isinstance(given, Mapping) else given
    return given is None or (isinstance(given, Mapping | list | tuple) and all(map(_is_empty, parts)))


def takes_positions(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _replace(sequence: Sequence, source: Sequence, groups: list[int], shift: int) -> None:
    assert sequence.sinks is not None
    for group in groups:
        table = sequence.tables[group]
        for number in range(table.kept):
            table.replace(number, source.tables[group].blocks[number])
    sequence.sinks = sequence.sinks.moved(shift)


@torch.no_grad()
def _forward_sinks(model: PreTrainedModel, beside: PagedCache, rows: list[tuple[Sequence, int]]) -> None:
    sinks = [(sequence.sinks, shift) for sequence, shift in rows if sequence.sinks]
    ids = torch.tensor([list(each.ids) for each, _ in sinks], device=input_device(model))
    starts = torch.tensor([[each.start + shift] for each, shift in sinks], device=input_device(model))
    positions = starts + torch.arange(ids.shape[1], device=input_device(model))
    names: dict[str, Any] = {compat.cache_argument(): beside, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        names["logits_to_keep"] = 1
    model(input_ids=ids, position_ids=positions, **names)


def _read(inputs: Mapping[str, Any], past: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [batch, length]."""
    content = read_content(inputs)
    if content is None or content.token_ids is None or content.by_position or others_given(inputs, content):
        raise StreamingError(
            "sinks= computes the first tokens of a text again and again, so it must be given as token ids alone, "
            f"not as {', '.join(sorted(name for name, given in inputs.items() if given is not None))}; use sinks=0, "
            "or make a first forward of token ids"
        )
    length = content.token_ids.shape[1]
    if content.positions is None:
        return content.token_ids, torch.arange(past, past + length).expand(content.shape)
    if content.positions.shape[2] != 1:
        raise StreamingError(
            f"sinks= knows positions that are one number, not {content.positions.shape[2]} for each token; use sinks=0"
        )
    return content.token_ids, content.positions[:, :, 0]


def _extended(sinks: SinkTokens | None, ids: list[int], positions: list[int]) -> SinkTokens | None:
    if not ids:
        return sinks
    known = sinks or SinkTokens(array("q"), positions[0])
    first = known.start + len(known.ids)
    if positions != list(range(first, first + len(ids))):
        raise StreamingError(
            f"the first tokens of a row stand at positions {positions[:8]}..., which do not count on from {first} by "
            "one, as sinks= needs; use sinks=0"
        )
    return known.extended(array("q", ids))
