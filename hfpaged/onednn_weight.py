"""The weight of a linear layer in the order that oneDNN multiplies fastest with.

A tensor that still says shape and dtype of the plain weight, multiplies without gradients by oneDNN's own kernel, and
turns itself into the plain weight, bit for bit, as soon as anything else is asked of it: a gradient, an update in
place, a state_dict, a view. So whoever holds it, an optimizer or PEFT, never meets numbers that are out of date.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map_only

from hfpaged.errors import UnsupportedModelError

logger = logging.getLogger("hfpaged")
_lock = threading.RLock()

# What can be said without the numbers: read from the wrapper itself.
_PROPERTIES = (
    "shape dtype device layout ndim itemsize nbytes names requires_grad is_leaf grad grad_fn retains_grad output_nr"
    " is_cpu is_cuda is_xpu is_mps is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn _backward_hooks"
    " _post_accumulate_grad_hooks _version"
)
_METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex"
    " is_signed is_inference get_device requires_grad_ is_same_size has_names __len__ __hash__ _is_view"
)
_CONVERSIONS = "to cpu float half bfloat16 double type contiguous"


def _named(names: str) -> list[Any]:
    return [found for name in names.split() if (found := getattr(Tensor, name, None)) is not None]


_tensor: Any = Tensor  # its stubs tell properties by what they return
_METADATA = {found.__get__ for found in _named(_PROPERTIES)} | set(_named(_METHODS))
_METADATA |= {_tensor.requires_grad.__set__, torch.numel, torch.is_floating_point, torch.is_complex}
_METADATA |= {found for name in ["_has_compatible_shallow_copy_type"] if (found := getattr(torch, name, None))}
_MAYBE_NOTHING = set(_named(_CONVERSIONS))


def onednn_fault() -> str | None:
    """Why this torch cannot reorder weights, None where it can."""
    if not torch.backends.mkldnn.is_available() or not getattr(torch.backends.mkldnn, "enabled", True):
        return "torch was built, or runs, without oneDNN"
    missing = [op for op in ("_reorder_linear_weight", "_linear_pointwise") if not hasattr(torch.ops.mkldnn, op)]
    return f"this torch has no mkldnn.{missing[0]}" if missing else None


def reordered(plain: Tensor) -> Tensor:
    """A copy of a plain weight [out, in] in oneDNN's order. Raises RuntimeError without a kernel for the dtype."""
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(plain.detach(), None)


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` by a reordered weight: x [..., in] to [..., out]; no gradients."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


class OnednnWeight(Tensor):
    """A weight [out, in] in oneDNN's order, and the modules that hold it. Made and undone by `pack` and `unpack`."""

    packed: Tensor
    sample: Tensor  # a few of its numbers, for the model's fingerprint
    owners: list[tuple[weakref.ref[nn.Module], str]]
    plain: Tensor | None  # kept for embeddings, which need rows, and for fewer rows than `min_rows`
    min_rows: int
    successor: nn.Parameter | None  # what this was turned into, where it could not turn itself

    @staticmethod
    def __new__(cls, plain: nn.Parameter, packed: Tensor, sample: Tensor, owners: Any) -> OnednnWeight:
        made = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device,
            requires_grad=plain.requires_grad,
        )  # fmt: skip
        made.packed, made.sample, made.owners = packed, sample, owners
        made.plain, made.min_rows, made.successor = None, 0, None
        made._is_param = True  # what isinstance(..., nn.Parameter) asks
        return made

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedModelError("torch.jit.trace cannot look into prepacked weights; unpatch the model before")
        if func is F.linear and _is_fast(*args, **kwargs):
            return _linear(*args, **kwargs)
        if func is F.embedding and _has_rows(*args, **kwargs):
            return F.embedding(args[0], args[1].plain, *args[2:], **kwargs)
        if func in _METADATA or _does_nothing(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(OnednnWeight, lambda weight: unpack(weight, _name(func)), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # What came here round __torch_function__ holds the tensor in C++, so that it cannot become another one.
        args, kwargs = tree_map_only(OnednnWeight, lambda weight: _replace(weight, _name(func)), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is plain, and leaves this one as it is."""
        if id(self) not in memo:
            memo[id(self)] = plain_of(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_of(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnednnWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """F.linear, under the names that it gives its arguments."""
    if weight.plain is not None and input.numel() < weight.min_rows * input.shape[-1]:
        return F.linear(input, weight.plain, bias)
    return multiply(input, weight.packed, bias)


def _is_fast(input: Any, weight: Any, bias: Any = None) -> bool:
    """Whether oneDNN gives what F.linear gives. Wherever that is in doubt the plain weight takes over."""
    if type(weight) is not OnednnWeight or weight.successor is not None or type(input) not in (Tensor, nn.Parameter):
        return False
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    packed = weight.packed
    if not input.is_cpu or input.dtype is not packed.dtype or input.dim() < 1 or input.shape[-1] != packed.shape[1]:
        return False
    if bias is not None and (type(bias) not in (Tensor, nn.Parameter) or bias.dtype is not packed.dtype):
        return False
    parts = (input, weight, bias)
    return not (torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts))


def _has_rows(*args: Any, **kwargs: Any) -> bool:
    """Whether an embedding may read the plain weight that was kept."""
    weight = args[1] if len(args) > 1 else None
    if type(weight) is not OnednnWeight or weight.plain is None or type(args[0]) is not Tensor:
        return False
    changes = kwargs.get("max_norm") is not None or len(args) > 3  # max_norm rescales the weight in place
    return not changes and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _does_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call such as .to("cpu") leaves a tensor of this dtype and device as it is."""
    if func == _tensor.data.__set__:
        return args[0] is args[1]
    if func not in _MAYBE_NOTHING or type(args[0]) is not OnednnWeight:
        return False
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(probe, *args[1:], **kwargs) is probe


def pack(
    parameter: nn.Parameter, packed: Tensor, sample: Tensor, owners: list[tuple[nn.Module, str]], min_rows: int = 0
) -> None:
    """Turn a parameter, for all who hold it, into `packed`. The plain numbers are freed, or with `min_rows` kept for
    embeddings and for inputs of fewer rows.

    Raises RuntimeError, and changes nothing, where somebody holds it in a way that would not follow: by a weak
    reference, or from C++.
    """
    with torch.inference_mode(False):
        known = [(weakref.ref(module), name) for module, name in owners]
        made = OnednnWeight(parameter, packed, sample, known)
        if min_rows:
            made.plain, made.min_rows = parameter.detach(), min_rows
        swap_tensors(parameter, made)


def unpack(weight: Any, reason: str | None = None) -> nn.Parameter:
    """Turn a weight back into the plain parameter, for all who hold it. `reason`: what asked for it, if not we."""
    with _lock:
        if type(weight) is not OnednnWeight:
            return weight  # another thread has done it
        if weight.successor is not None:
            return weight.successor
        plain, told = plain_of(weight, weight.plain), _told(weight, reason)
        try:
            with torch.inference_mode(False):
                swap_tensors(weight, plain)
        except RuntimeError:
            return _succeed(weight, plain)
        told()
        parameter: Any = weight
        return parameter


def _replace(weight: Any, reason: str) -> nn.Parameter:
    """As `unpack`, but it stays what it is and hands everything to its successor."""
    with _lock:
        if weight.successor is None:
            told = _told(weight, reason)
            _succeed(weight, plain_of(weight, weight.plain))
            told()
    successor: nn.Parameter = weight.successor
    return successor


def _succeed(weight: Any, plain: nn.Parameter) -> nn.Parameter:
    weight.successor = plain
    del weight.packed, weight.plain
    for reference, name in weight.owners:
        module = reference()
        if module is not None and module._parameters.get(name) is weight:
            module._parameters[name] = plain
    return plain


def plain_of(weight: OnednnWeight, kept: Tensor | None = None) -> nn.Parameter:
    """The same numbers as a plain parameter, in memory of its own or `kept`; never one that inference mode made."""
    with torch.inference_mode(False), torch.no_grad():
        if kept is None:
            kept = weight.packed.to_dense() if weight.successor is None else weight.successor.detach().clone()
        return nn.Parameter(kept, requires_grad=weight.requires_grad)


def _told(weight: OnednnWeight, reason: str | None) -> Callable[[], None]:
    shape = tuple(weight.shape)
    if reason is None:
        return lambda: None
    return lambda: logger.info("a prepacked weight %s is plain again, because of %s", shape, reason)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return f"Tensor.{getattr(owner, '__name__', name)}"
    return str(name)
