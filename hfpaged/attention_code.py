"""What the code of a model's attention does with keys and values between the cache and the attention function.

Read from the source of its modules, so that it is known before a token has been computed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hfpaged import compat


@dataclass(frozen=True)
class AttentionCode:
    """Of one class of modules that bring keys and values to a cache.

    reaches_registry  its attention function comes out of transformers' registry, where ours is
    hands_over        that function gets keys and values as the cache returned them
    keeps_mask        and the mask as the model made it, and nothing to add to the scores
    makes_mask        it works on the mask itself, where none at all may mean something else than a causal one
    heeds_name        what it does depends on what the attention implementation is called
    """

    reaches_registry: bool = False
    hands_over: bool = False
    keeps_mask: bool = False
    makes_mask: bool = False
    heeds_name: bool = False

    @property
    def is_switchable(self) -> bool:
        """Whether it does the same under our name as under the one that it had."""
        return self.reaches_registry and not self.heeds_name and not self.makes_mask


def switchable_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs inside `model` in which attention is looked up that can be ours instead."""
    fixed = {_config_id(module) for module, code in writers(model) if not code.is_switchable}
    return [config for config in compat.configs_of(model) if id(config) not in fixed]


def stores_padding(model: PreTrainedModel) -> bool:
    """Whether keys of padding have to be stored too. Only our attention function sees to it that what was not stored
    is not attended to. Code of a model's own might: ProphetNet heeds no mask when it decodes.
    """
    switched = {id(config) for config in switchable_configs(model)}
    found = writers(model)
    return not found or any(not code.is_switchable or _config_id(module) not in switched for module, code in found)


def writers(model: nn.Module) -> list[tuple[Any, AttentionCode]]:
    """The modules that bring keys and values to a cache."""
    return [(module, code) for module in model.modules() if (code := attention_code(type(module))) is not None]


def _config_id(module: Any) -> int:
    return id(getattr(module, "config", None))


def attention_code(cls: type) -> AttentionCode | None:
    """None for a class that brings nothing to a cache, and for one whose source cannot be read."""
    if cls not in _codes:
        _codes[cls] = _read_class(cls)
    return _codes[cls]


_codes: dict[type, AttentionCode | None] = {}


def _read_class(cls: type) -> AttentionCode | None:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(cls, "forward", cls))))
        forward = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    updates = [node for node in ast.walk(forward) if isinstance(node, ast.Assign) and _is_update(node.value)]
    if not updates or not isinstance(forward, ast.FunctionDef):
        return None
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call) and _is_interface(node, source)]
    return _read(forward, updates, calls[-1]) if calls else AttentionCode()


def _read(forward: ast.FunctionDef, updates: list[ast.Assign], call: ast.Call) -> AttentionCode:
    cached = set().union(*(_names(update.targets[0]) for update in updates))
    last = max(update.lineno for update in updates)
    given = set().union(*(_names(argument) for argument in call.args))
    changed = _assigned(forward, last + 1, call.lineno)
    mask = _names(_mask_of(call))
    makes_mask = bool(mask & _assigned(forward, 0, call.lineno, but=_is_passed_on))
    biased = any(keyword.arg == "position_bias" for keyword in call.keywords)
    return AttentionCode(
        reaches_registry=True,
        hands_over=cached <= given and not cached & changed,
        keeps_mask=bool(mask) and not makes_mask and not biased,
        makes_mask=makes_mask,
        heeds_name=any(isinstance(node, ast.If) and _is_of_name(node.test) for node in ast.walk(forward)),
    )


def _mask_of(call: ast.Call) -> ast.AST:
    """The fifth argument, after module, query, key and value."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "attention_mask"]
    return (call.args[4:] + named)[0] if call.args[4:] + named else ast.Constant(None)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _assigned(tree: ast.AST, first: int, end: int, but: Callable[[ast.expr], bool] = lambda value: False) -> set[str]:
    """Names that get another value in lines `first` to `end`; `but` tells values that do not count."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign) and first <= node.lineno < end and not but(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= set().union(*(_names(target) for target in targets))
    return found


def _is_passed_on(value: ast.expr) -> bool:
    """`mask`, `masks.get("causal")`, `mask or {}`: another name for what was given."""
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    is_plain = not any(isinstance(node, ast.BinOp | ast.Subscript) for node in ast.walk(value))
    return is_plain and all(isinstance(func, ast.Attribute) and func.attr == "get" for func in calls)


def _is_of_name(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "_attn_implementation" for node in ast.walk(test))


def _is_update(node: ast.expr) -> bool:
    """`cache.update(key, value, layer_idx, ...)`, whatever the cache is called."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and len(node.args) >= 2
    )


def _is_interface(node: ast.Call, source: str) -> bool:
    return isinstance(node.func, ast.Name) and f"{node.func.id} = ALL_ATTENTION_FUNCTIONS" in source.replace(
        ": Callable", ""
    )
