"""Which of a model's PEFT adapters act, chosen for one forward at a time.

The model stays its owner's: what a forward finds active it leaves active. PEFT's own `set_adapter` walks through the
whole model and turns gradients on and off, milliseconds for each step; here the few layers that PEFT has replaced are
known, and told directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from hfpaged.adapters import adapter_layers
from hfpaged.compat import transformers_model
from hfpaged.errors import AdapterLostError, InvalidConfigError

BASE = "__base__"  # PEFT's own name for no adapter


class Layer(NamedTuple):
    """A layer of PEFT, and the adapters that have a part in it."""

    module: Any
    names: frozenset[str]

    @property
    def state(self) -> tuple[Any, bool]:
        """What acts in it now."""
        return self.module._active_adapter, self.module._disable_adapters

    def choose(self, adapter: str) -> None:
        """Let one adapter act, or BASE."""
        if adapter == BASE:
            self.module._disable_adapters = True
        else:
            self.module._active_adapter = [adapter] if adapter in self.names else []
            self.module._disable_adapters = False

    def restore(self, state: tuple[Any, bool]) -> None:
        """Back to what acted at that time."""
        self.module._active_adapter, self.module._disable_adapters = state


class AdapterChoices:
    """The adapters of `model` as they were when it was looked at.

    names    those that a request can choose
    faults   why others cannot be chosen, by name
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._configs = dict(_configs(model))
        inner = transformers_model(model)
        self.layers = [Layer(module, _names_in(module)) for module in adapter_layers(inner)]
        there = frozenset[str]().union(*(layer.names for layer in self.layers))
        faults = {name: _fault(name, config, there) for name, config in self._configs.items()}
        self.faults = {name: fault for name, fault in faults.items() if fault}
        self.names = tuple(name for name in self._configs if name not in self.faults)

    @property
    def are_current(self) -> bool:
        """Whether the model still has these adapters and no others."""
        now, known = _configs(self._model), self._configs
        return len(now) == len(known) and all(known.get(name) is config for name, config in now.items())

    def configs(self, names: Set[str]) -> dict[str, Any]:
        """PEFT's configs of these adapters, one object for each time that an adapter is loaded."""
        return {name: config for name, config in self._configs.items() if name in names}

    def check(self, adapter: str) -> None:
        """Raises InvalidConfigError for an adapter that a request cannot choose."""
        if adapter in self.faults:
            raise InvalidConfigError(
                f"adapter={adapter!r} cannot be chosen for single requests: {self.faults[adapter]}"
            )
        if adapter != BASE and adapter not in self.names:
            known = ", ".join(map(repr, self.names)) or "none: load one with PEFT"
            raise InvalidConfigError(
                f"adapter={adapter!r} is unknown; the model has {known}, and {BASE!r} stands for none of them"
            )
        if self.merged:
            raise InvalidConfigError(_merged_fault(self.merged))

    def check_there(self, chosen: Set[str | None]) -> None:
        """Raises AdapterLostError for adapters that have been chosen and cannot act any more."""
        lost = {name for name in chosen if name not in (None, BASE) and name not in self.names}
        if lost:
            raise AdapterLostError(lost, f"the model has no adapter {', '.join(map(repr, lost))} any more")
        if self.merged:
            raise AdapterLostError(chosen - {None}, _merged_fault(self.merged))

    @property
    def merged(self) -> list[str]:
        """Adapters that lie in the weights of some layer, where they act whatever is chosen."""
        return sorted({name for layer in self.layers for name in layer.module.merged_adapters})

    @contextmanager
    def chosen(self, adapter: str) -> Iterator[None]:
        """One adapter, or BASE, acts inside."""
        before = [layer.state for layer in self.layers]
        try:
            for layer in self.layers:
                layer.choose(adapter)
            yield
        finally:
            for layer, state in zip(self.layers, before, strict=True):
                layer.restore(state)


def _configs(model: Any) -> dict[str, Any]:
    """PEFT's own, by adapter: of its wrapper, which alone knows of learned prompts, or of a model that has layers."""
    return getattr(model, "peft_config", None) or getattr(transformers_model(model), "peft_config", None) or {}


def _names_in(module: Any) -> frozenset[str]:
    """The adapters that have weights of their own in a layer of PEFT."""
    kinds = (attrgetter(kind)(module) for kind in module.adapter_layer_names)
    return frozenset(name for kind in kinds if hasattr(kind, "keys") for name in kind)


def _fault(name: str, config: Any, there: Set[str]) -> str:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "is_prompt_learning", False):
        return f"{kind} puts tokens of its own before a prompt, for which a batcher has no place"
    if getattr(config, "alora_invocation_tokens", None):
        return "it acts from certain tokens of a prompt on (aLoRA); load it without alora_invocation_tokens"
    if kind == "XLORA":
        return "XLORA mixes adapters by what a first forward says"
    return "" if name in there else f"no layer of the model holds it ({kind})"


def _merged_fault(merged: list[str]) -> str:
    return (
        f"{', '.join(map(repr, merged))} lies merged in the weights and acts whatever is chosen; call "
        "unmerge_adapter() first"
    )
