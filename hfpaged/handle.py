"""Lazy tensors: they carry what our attention needs and become dense only when other code touches them.

Any operation on one materialises it (`__torch_dispatch__`), so that a cache stays right under any attention
implementation, and costs nothing dense under ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from hfpaged.layer_step import LayerStep


class LazyTensor(Tensor):
    """Base: shape, dtype and device are known, the numbers are made on first use and kept."""

    _dense: Tensor | None

    @classmethod
    def wrap(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._dense = None
        return self

    def dense(self) -> Tensor:
        """The plain tensor: contiguous, as the lazy one says that it is and views of it rely on."""
        if self._dense is None:
            self._dense = self.materialise().contiguous()
        return self._dense

    def materialise(self) -> Tensor:
        raise NotImplementedError

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(LazyTensor, LazyTensor.dense, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


# Wrapper tensors go through torch's Python dispatch only; the functional layer above would only cost time.
LazyTensor.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[method-assign, assignment]


class LazyKV(LazyTensor):
    """What `PagedCache.update` returns for keys or values: [batch, num_kv_heads, visible length, dim]."""

    step: LayerStep
    is_key: bool

    def materialise(self) -> Tensor:
        return self.step.dense(self.is_key)
