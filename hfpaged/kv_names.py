"""KV formats as users write them: one name, or two with a slash between them for keys and values."""

from __future__ import annotations

from collections.abc import Collection

from hfpaged.errors import InvalidConfigError

# What torch and other engines call them.
_OTHER_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "fp8": "fp8_e4m3"}


def known_name(
    kv_dtype: str, formats: Collection[str], keys: Collection[str], values: Collection[str]
) -> tuple[str, tuple[str, str] | None]:
    """(our name of it, and those of its keys and values where they are apart). Raises InvalidConfigError with the names
    that exist.
    """
    name = kv_dtype.removeprefix("torch.")
    name = _OTHER_NAMES.get(name, name)
    if name in formats:
        return name, None
    key, slash, value = name.partition("/")
    if not slash or key not in keys or value not in values:
        raise InvalidConfigError(
            f"kv_dtype={name!r} is not known; use one of {', '.join(formats)}, or two with a slash between them for "
            f"keys and values: {', '.join(keys)}"
        )
    return name, (key, value)
