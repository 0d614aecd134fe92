"""Copies of blocks between a CUDA device and rows in pinned host memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfpaged.device_timer import DeviceTimer

if TYPE_CHECKING:
    from hfpaged.block_rows import RowPart

_MOST_STAGED = 2**27  # bytes of device memory beside the pool


class DeviceCopies:
    """The device gathers blocks into one piece of memory, in the order of its work, so that whoever writes into the
    blocks next need not wait; that piece is copied beside the work. The other way round whatever is computed next
    waits for the copy.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(
        self, device: torch.device, parts: Many[RowPart], blocks: Many[int], rows: Tensor, places: Many[int]
    ) -> None:
        """Copy `parts` of `blocks` into `rows[places]`, some time soon: `settle` waits."""
        stream, start, stop = self._stream(device), parts[0].start, parts[-1].stop
        for few in _pieces(len(blocks), stop - start):
            chosen = torch.tensor(blocks[few], device=device)
            staged = torch.empty(len(chosen), stop - start, dtype=torch.uint8, device=device)
            for part in parts:
                with part.store.open(part.name) as data:
                    if not len(data):
                        continue
                    # Of a kind of keys that these blocks are not of there may be fewer, see `BlockRows.take`.
                    there = chosen if max(blocks[few]) < len(data) else chosen.clamp(max=len(data) - 1)
                    gathered = _flat_words(data, part).index_select(0, there)
                staged[:, part.start - start : part.stop - start] = gathered.view(torch.uint8)
            stream.wait_stream(torch.cuda.current_stream(device))
            staged.record_stream(stream)
            with torch.cuda.stream(stream):
                for row, place in enumerate(places[few]):
                    rows[place, start:stop].copy_(staged[row], non_blocking=True)

    def put(
        self, device: torch.device, parts: Many[RowPart], rows: Tensor, places: Many[int], blocks: Many[int]
    ) -> None:
        """Copy `rows[places]` into `parts` of `blocks`."""
        stream, start, stop = self._stream(device), parts[0].start, parts[-1].stop
        current = torch.cuda.current_stream(device)
        for few in _pieces(len(blocks), stop - start):
            chosen = torch.tensor(blocks[few], device=device)
            staged = torch.empty(len(chosen), stop - start, dtype=torch.uint8, device=device)
            stream.wait_stream(current)  # what lay in this memory before may be in use until now
            staged.record_stream(stream)
            with torch.cuda.stream(stream):
                timed = self._timer.begin(staged.nbytes, device)
                for row, place in enumerate(places[few]):
                    staged[row].copy_(rows[place, start:stop], non_blocking=True)
                self._timer.end(timed)
            current.wait_stream(stream)
            for part in parts:
                contents = staged[:, part.start - start : part.stop - start].contiguous()
                with part.store.open(part.name) as data:
                    words = _flat_words(data, part)
                    words.index_copy_(0, chosen, contents.view(words.dtype))

    def settle(self) -> None:
        """Wait for all copies that were begun."""
        for stream in self._streams.values():
            stream.synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _flat_words(data: Tensor, part: RowPart) -> Tensor:
    """[blocks, words] over the memory of a store, of any format."""
    return data.detach().flatten(1).view(torch.uint8).view(torch.int64 if part.nbytes % 8 == 0 else torch.uint8)


def _pieces(count: int, nbytes: int) -> list[slice]:
    """Of so many rows of `nbytes` each as many at once as may be staged."""
    step = max(_MOST_STAGED // max(nbytes, 1), 1)
    return [slice(start, start + step) for start in range(0, count, step)]
