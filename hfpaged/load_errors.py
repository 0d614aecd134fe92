"""What keeps a model or its tokenizer from being loaded, said for those who want to use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError

from hfpaged import custom_code
from hfpaged.demo_wheel import DemoModelError
from hfpaged.errors import HfpagedError


@contextmanager
def told(name: str | Path, remedy: str) -> Iterator[None]:
    """What is raised inside becomes DemoModelError, in one sentence that ends with `remedy` or a better one."""
    try:
        yield
    except SafetensorError as error:
        raise DemoModelError(
            f"cannot load {str(name)!r}: {first_sentence(error)}; its file of weights is cut short, or a pointer that "
            "git left there: fetch it again (`git lfs pull`, or from the hub)"
        ) from error
    except ImportError as error:  # names the package, and how to install it
        raise DemoModelError(f"cannot load {str(name)!r}: {first_sentence(error)}; install what it needs") from error
    except (HfpagedError, torch.OutOfMemoryError):
        raise
    except UnpicklingError as error:
        raise DemoModelError(
            f"cannot load {str(name)!r}: its weights are a pickle of other things than tensors, which could run any "
            "code and is not read; use a checkpoint in safetensors"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:  # a RuntimeError: weights of other shapes than the config's
        if isinstance(error, ValueError) and custom_code.is_refused(error):
            raise DemoModelError(custom_code.refusal(name)) from error
        raise DemoModelError(f"cannot load {str(name)!r}: {first_sentence(error)}; {remedy}") from error


def first_sentence(error: BaseException) -> str:
    """Of what it says, without the dot."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:; ")
