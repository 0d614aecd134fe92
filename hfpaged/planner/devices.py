"""The machine that a plan is for: a card by its name, a size, or what is found here. torch is not asked: it would take
seconds to load.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil

from hfpaged.config import parse_bytes
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.cards import Card, card_named, find_card
from hfpaged.planner.case import Machine

DETECT, CPU = "detect", "cpu"
# A bare number of at most this is one of GB, as in "an 80 GB card".
MOST_GB = 100_000
# A smaller one is part of a processor, and of its memory.
LEAST_VRAM = 4 << 30
SECONDS = 5

_QUERY = ("--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")


def machine_of(text: str, sysfs: Path = Path("/sys")) -> Machine:
    """The machine that `text` names: a card, a size ("80GiB", "80GB", "80" for 80 GB), "cpu" for this machine's memory,
    or "detect" for its GPU, and its memory where there is none. Raises InvalidConfigError.
    """
    word = text.strip().lower()
    if word == CPU:
        return _memory()
    if word == DETECT:
        return _nvidia() or _amd(sysfs) or _memory()
    if (size := _size(word)) is not None:
        return Machine(f"a device of {text.strip()}" + " GB" * _is_bare(word), size)
    return machine_with(card_named(text))


def machine_with(card: Card) -> Machine:
    """A machine with this card, and nothing else on it."""
    return Machine(card.name, card.memory, "table of cards", bandwidth=card.bandwidth, link=card.link)


def _is_bare(word: str) -> bool:
    """Whether it is a number of GB without a unit."""
    return bool(re.fullmatch(r"\d+(\.\d+)?", word)) and float(word) <= MOST_GB


def _size(word: str) -> int | None:
    """Bytes, None where `word` is no size."""
    if _is_bare(word):
        word += "gb"
    elif re.fullmatch(r"\d+(\.\d+)?\s*[gt]", word):
        word += "b"
    elif not re.match(r"\d", word):
        return None
    try:
        return parse_bytes(word)
    except InvalidConfigError:
        raise InvalidConfigError(
            f"device={word!r} begins like a size and is none; write 80GiB or 80GB, or the name of a card"
        ) from None


def _memory() -> Machine:
    memory = psutil.virtual_memory()
    used = memory.total - memory.available
    return Machine("this machine's memory", memory.total, "found here", in_use=used, is_cpu=True)


def _nvidia() -> Machine | None:
    """The first card of nvidia-smi; None without one, and where torch is built without CUDA."""
    program = shutil.which("nvidia-smi")
    if program is None or _torch_is_for_cpus():
        return None
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    cards = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.count(",") >= 2]
    if not cards:
        return None
    name, total, used = cards[0]
    return _card_here(name, total, used, len(cards))


def _card_here(name: str, total: str, used: str, count: int) -> Machine | None:
    """Sizes in MiB. The table knows what programs see of a card, which is less than nvidia-smi says."""
    if not total.strip().isdecimal():
        return None
    card, memory = find_card(name), int(total) << 20
    in_use = int(used) << 20 if used.strip().isdecimal() else 0
    seen = min(memory, card.memory) if card is not None and abs(card.memory / memory - 1) < 0.1 else memory
    bandwidth, link = (None, None) if card is None else (card.bandwidth, card.link)
    return Machine(name.strip(), seen, "found here", in_use=in_use, bandwidth=bandwidth, link=link, count=count)


def _amd(sysfs: Path) -> Machine | None:
    """The largest card of the amdgpu driver, by what it writes into sysfs."""
    if _torch_is_for_cpus():
        return None
    cards = []
    for path in sorted(sysfs.glob("class/drm/card*/device/mem_info_vram_total")):
        total, used = _number(path), _number(path.with_name("mem_info_vram_used"))
        if total >= LEAST_VRAM:
            cards.append(Machine("AMD GPU", total, "found here", in_use=used))
    return replace(max(cards, key=lambda card: card.memory), count=len(cards)) if cards else None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _torch_is_for_cpus() -> bool:
    try:
        return "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
