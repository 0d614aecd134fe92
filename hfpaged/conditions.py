"""What a command changes of its process while it runs, and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging as transformers_logging


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """This many threads for torch; as many as it has chosen for None."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and remarks of transformers between our lines."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with without_bars():
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextmanager
def without_bars(wanted: bool = True) -> Iterator[None]:
    """Its remarks, and no bars of it."""
    bars = transformers_logging.is_progress_bar_enabled()
    if wanted:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
