"""Models that bring code of their own, which runs where somebody has said that he trusts it; nobody is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config


def is_refused(error: ValueError) -> bool:
    """Whether transformers would run code of the model if it were trusted."""
    return "trust_remote_code" in str(error)


def refusal(name: str | Path) -> str:
    """What its user is told: of which files, and what he can do."""
    return (
        f"cannot load {str(name)!r}: it brings code of its own{files_of(name)}, which would run with all rights of "
        "this process; read it, and if you trust it give --trust-remote-code (trust_remote_code=True)"
    )


def files_of(name: str | Path) -> str:
    """The files of that code in brackets; nothing where neither config names any."""
    files = ", ".join(sorted(set(_files(str(name)))))
    return f" ({files})" if files else ""


def _files(name: str) -> Iterator[str]:
    for read in (_config, get_tokenizer_config):
        with suppress(OSError, ValueError):  # it may have no such file, and the other one names the code
            for given in read(name).get("auto_map", {}).values():
                yield from (_file(each) for each in (given if isinstance(given, list) else [given]) if each)


def _config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    return found


def _file(reference: str) -> str:
    """Of a class: `org/repo--module.Class`, or `module.Class`."""
    repository, _, place = reference.rpartition("--")
    module = place.rpartition(".")[0].replace(".", "/") + ".py"
    return f"{module} of {repository}" if repository else module
