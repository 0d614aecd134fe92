"""What stands behind the flags of `hfpaged serve`: argparse calls these, and tells what they raise in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hfpaged.config import check_block_size, parse_bytes
from hfpaged.errors import InvalidConfigError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_TIMES = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
# The name before "=" where a key is given to a tenant. A key of base64 may end with "=", but nothing follows then.
_OWNED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(?==*[^=])(.+)")


def add_flag(group: argparse._ArgumentGroup, name: str, line: str, why: str, **rest: Any) -> None:
    """Declare a flag; `why`: the default and its reason."""
    group.add_argument(name, help=f"{line} (default: {why})".replace("%", "%%"), **rest)


def count(text: str) -> int:
    """At least 1; "8k" is 8000 and "8K" is 8192."""
    match = _COUNT.fullmatch(text)
    found = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if match is None or found < 1 or (not match[2] and found % 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1, such as 8192 or 8K")
    return int(found)


def count_or_none(text: str) -> int:
    """At least 0."""
    return 0 if text == "0" else count(text)


def port(text: str) -> int:
    """0 takes a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; use 0 (a free one) to 65535")
    return int(text)


def seconds(text: str) -> float:
    """More than 0, and no more than a year."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 366 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; use seconds, more than 0")
    return found


def seconds_or_none(text: str) -> float:
    """0 is allowed, too."""
    return 0.0 if text in ("0", "0.0") else seconds(text)


def share(text: str) -> float:
    """More than 0, and at most 1."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the memory; use more than 0 and at most 1")
    return found


def sample(text: str) -> float:
    """A share of the requests: "1%" or 0.01. More than 0, and all at most."""
    number = text.strip().removesuffix("%")
    try:
        found = float(number) / (1 if number == text.strip() else 100)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share of the requests; write 1% or 0.01, more than 0 and at most 100%"
        )
    return found


def size(text: str) -> int:
    """Bytes of "2GiB", "512MB" or a number."""
    try:
        return parse_bytes(text)
    except InvalidConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 2GiB or 512MB") from None


def size_or_none(text: str) -> int:
    """The same, or 0."""
    return 0 if text.strip() == "0" else size(text)


def folder(text: str) -> str:
    """A directory, by the path that other processes, which work elsewhere, find it under as well."""
    return str(Path(text).expanduser().absolute())


def block_size(text: str) -> int:
    """A power of two."""
    try:
        return check_block_size(int(text) if text.isdecimal() else 0)
    except InvalidConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two from 1 to 1024; use 16 or 32") from None


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def origin(text: str) -> str:
    """http://HOST:PORT"""
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write http://HOST:4317")
    return text


def api_keys(given: Iterable[str], file: str | None, environment: str | None) -> dict[str, str]:
    """By tenant, those of the flags first, then of the file, then of the environment. A key without a tenant gets
    "key-N", N its place. Raises InvalidConfigError.
    """
    lines = [*given, *(_lines(file) if file is not None else ()), *_separated(environment)]
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        tenant, key = _owned(line.strip(), number)
        if tenant in found:
            raise InvalidConfigError(f"two API keys are of the tenant {tenant!r}; give each a name of its own")
        if key in found.values():
            raise InvalidConfigError(f"the API key of {tenant!r} is another tenant's as well; make one for each")
        found[tenant] = key
    return found


def _owned(line: str, number: int) -> tuple[str, str]:
    if not line.isascii():
        raise InvalidConfigError(f"API key {number} has characters that HTTP headers do not carry; use ASCII ones")
    if not line or not line.isprintable() or " " in line:
        raise InvalidConfigError(
            f"API key {number} is empty or holds spaces; an empty variable in its place would let everybody in"
        )
    match = _OWNED.fullmatch(line)
    return (match[1], match[2]) if match else (f"key-{number}", line)


def _lines(file: str) -> list[str]:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"--api-key-file {file}: {getattr(error, 'strerror', error)}") from error
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise InvalidConfigError(f"--api-key-file {file} holds no key; without one the server would let everybody in")
    return found


def _separated(environment: str | None) -> list[str]:
    return [part for part in (environment or "").split(",") if part.strip()]


def adapters(given: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """By name. Raises InvalidConfigError for a name that comes twice."""
    found: dict[str, str] = {}
    for name, path in given:
        if name in found:
            raise InvalidConfigError(f"--adapter {name}= is given twice; give each adapter a name of its own")
        found[name] = path
    return found
