"""What is measured and where: the model, its tokenizer, the device, and the versions of everything."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hfpaged_kernels
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hfpaged import custom_code, demo_model
from hfpaged.bench.endpoint import Endpoint
from hfpaged.bench.serve_rows import RATE


@dataclass(frozen=True)
class Setting:
    """`tokenizer` is None where the model has none; token ids are drawn at random then. `against` is another server,
    `rate` how many requests per second come to it and to ours. `trust_remote_code`: for whoever loads it again.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    repeats: int
    is_quick: bool
    against: Endpoint | None = None
    rate: float = RATE
    trust_remote_code: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model was made for, None where it does not say."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def text_config(self) -> Any:
        """The config of the part that generates."""
        return self.model.config.get_text_config(decoder=True)

    def synchronize(self) -> None:
        """Wait until the device has done all it was told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def header(self) -> dict[str, Any]:
        """What the figures depend on."""
        server = {} if self.against is None else {"against": f"{self.against.model} at {self.against.url}"}
        return {
            "model": self.model.config._name_or_path or type(self.model).__name__,
            "parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": _device_name(self.device),
            "cpu": _cpu_name(),
            "threads": torch.get_num_threads(),
            "kernels": hfpaged_kernels.backend(self.device),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "hfpaged": version("hfpaged"),
            "repeats": self.repeats,
            "quick": self.is_quick,
            **server,
        }


def load(
    name: str | None, dtype: str, device: str, *, trust_remote_code: bool = False
) -> demo_model.Loaded | tuple[PreTrainedModel, None]:
    """The model in eval mode, and its tokenizer where it has one. Raises as demo_model.load()."""
    if name is None or not _lacks_tokenizer(name, trust_remote_code):
        return demo_model.load(name, dtype, device, trust_remote_code=trust_remote_code)
    return demo_model.load_without_tokenizer(name, dtype, device, trust_remote_code=trust_remote_code), None


def _lacks_tokenizer(name: str, trust: bool) -> bool:
    """Whether there is a model of that name, without a tokenizer."""
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError):
        return False
    try:
        AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        return not (isinstance(error, ValueError) and custom_code.is_refused(error))
    return False


def _cpu_name() -> str:
    """As Linux says it, elsewhere the architecture; and how many cores it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
