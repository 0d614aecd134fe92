"""Our mask function: it keeps what a mask is made of, and makes the dense one only when somebody needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfpaged import compat
from hfpaged.attention_origin import origin
from hfpaged.errors import CacheMismatchError
from hfpaged.handle import LazyTensor
from hfpaged.mask_pattern import MaskPattern, mask_pattern
from hfpaged.rows import Rows


class LazyMask(LazyTensor):
    """[batch, 1, query_length, kv_length] bool, True where a query sees a key (as sdpa has it)."""

    arguments: dict[str, Any]
    is_plain: bool  # causal, perhaps with a window, and padding
    window: int | None
    _checked: tuple[Rows, int, bool] | None
    _made: dict[str, Tensor | None]
    _source: LazyMask | None  # the one that this is a copy of, on another device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """accelerate moves a mask to the device of each layer that gets it, and layers that read keys of others
        compute the last position only and cut the mask to it (Gemma 4): ours stays lazy on its way.
        """
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (None, torch.bool):
            return args[0].on(torch.device(kwargs["device"])) if kwargs.get("device") else args[0]
        if func is torch.ops.aten.slice.Tensor and isinstance(args[0], LazyMask) and args[1:2] == (2,):
            every = range(args[0].shape[2])
            taken = every[slice(*args[2:])]
            if len(taken) and taken == every[taken[0] :]:
                return args[0].last_queries(len(taken))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def on(self, device: torch.device) -> LazyMask:
        """This mask for layers on `device`. It is made where its arguments lie, and copied where somebody needs it."""
        moved: LazyMask = LazyMask.wrap(tuple(self.shape), torch.bool, device)
        moved.arguments, moved.is_plain, moved.window = self.arguments, self.is_plain, self.window
        moved._checked, moved._made, moved._source = None, {}, self
        return moved

    def materialise(self) -> Tensor:
        """Always a tensor, for code that works on the mask itself."""
        if self._source is not None:
            return self._source.dense().to(self.device)
        name = origin(self.arguments["config"])
        function = compat.own_mask_function(name) or compat.own_mask_function("sdpa")
        assert function is not None
        never_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense: Tensor = function(**self.arguments | never_skip)
        return dense

    def for_attention(self, name: str) -> Tensor | None:
        """What the attention implementation `name` would have been given, None included."""
        if self._source is not None:
            made = self._source.for_attention(name)
            return None if made is None else made.to(self.device)
        if name not in self._made:
            function = compat.own_mask_function(name)
            self._made[name] = None if function is None else function(**self.arguments)
        return self._made[name]

    def is_of_last_query(self, rows: Rows) -> bool:
        """Whether it has one query only, that of the last position."""
        is_last = self.arguments["q_length"] == 1 and self.arguments["q_offset"] + 1 == rows.length
        return bool(is_last and not rows.is_packed)

    def last_queries(self, count: int) -> LazyMask:
        """The mask of the last `count` queries."""
        dropped = self.arguments["q_length"] - count
        last = paged_mask(**self.arguments | {"q_length": count, "q_offset": self.arguments["q_offset"] + dropped})
        return last if self._source is None else last.on(self.device)

    def agrees_with(self, rows: Rows) -> bool:
        """Whether the padding of this mask is just what `rows` did not store. Looked at once per step."""
        if self._source is not None:
            return self._source.agrees_with(rows)
        if self._checked is None or self._checked[0] is not rows or self._checked[1] != rows.length:
            self._checked = (rows, rows.length, self._compare(rows))
        return self._checked[2]

    def _compare(self, rows: Rows) -> bool:
        self._check_stored(rows)
        if self.window is not None and rows.kept is not None and not is_left_padding(rows):
            return False  # a window counts positions, those of padding inside a row too
        padding = self.arguments.get("attention_mask")
        if padding is None:
            return rows.kept is None
        if padding.shape[1] != rows.length:
            return False
        if rows.kept is None:
            return bool(padding.all())
        return torch.equal(padding.to("cpu", torch.bool), torch.from_numpy(rows.kept))

    def _check_stored(self, rows: Rows) -> None:
        """A model may make its mask of another one than it was given (GIT adds one for images)."""
        padding = self.arguments.get("attention_mask")
        if rows.kept is None or padding is None or padding.ndim != 2:
            return
        asked = padding.to("cpu", torch.bool).numpy()[:, : rows.length]
        if asked.shape[0] == len(rows.kept) and (asked & ~rows.kept[:, : asked.shape[1]]).any():
            raise CacheMismatchError(
                "the model attends to positions that its attention_mask had as padding, which is not stored; use "
                "PagedCache(config=model.config) and hfpaged.unpatch(model), which store padding too"
            )


@torch.compiler.disable
def paged_mask(**arguments: Any) -> LazyMask:
    """Called by transformers once per mask type and forward, by keyword."""
    shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
    mask: LazyMask = LazyMask.wrap(shape, torch.bool, torch.device(arguments.get("device", "cpu")))
    pattern = _pattern(arguments)
    mask.arguments, mask._checked, mask._made, mask.window = _frozen(arguments), None, {}, pattern.window
    mask.is_plain, mask._source = pattern.is_causal and not arguments.get("use_vmap", False), None
    return mask


def _pattern(arguments: dict[str, Any]) -> MaskPattern:
    """Of the queries of this forward. Where it is more than we know, one that is not causal."""
    offset = arguments.get("q_offset", 0)
    if isinstance(offset, Tensor):  # of a static cache, which is none of ours: no wait for its device
        offset = 0
    pattern = mask_pattern(arguments["mask_function"], slice(offset, offset + arguments["q_length"]))
    return pattern or MaskPattern()


def _frozen(arguments: dict[str, Any]) -> dict[str, Any]:
    """A static cache gives its own counter as the offset, and counts on before the mask is made."""
    return {
        name: value.clone() if name.endswith("_offset") and isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def is_left_padding(rows: Rows) -> bool:
    """Whether all padding of each row lies before its first token."""
    assert rows.kept is not None
    return bool((rows.kept[:, 1:] >= rows.kept[:, :-1]).all())
