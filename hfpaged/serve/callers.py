"""Who asks: API keys make tenants, and each tenant has prefixes of its own."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import NamedTuple

from hfpaged.serve.http_errors import ApiError


class Caller(NamedTuple):
    """`tenant` is the name of its API key, "" where the server has none."""

    tenant: str = ""


class KeyRing:
    """API keys by tenant, and what their salts are derived from."""

    def __init__(self, api_keys: Mapping[str, str], secret: bytes | None = None) -> None:
        self._keys = {tenant: key.encode() for tenant, key in api_keys.items()}
        self._secret = secret or os.urandom(32)

    @property
    def is_needed(self) -> bool:
        """Whether there is any key."""
        return bool(self._keys)

    def caller(self, authorization: str | None) -> Caller:
        """By the header `Authorization: Bearer KEY`. Raises ApiError 401."""
        if not self.is_needed:
            return Caller()
        scheme, _, given = (authorization or "").partition(" ")
        found = None
        for tenant, key in self._keys.items():  # all of them: time must not tell which one is nearly right
            if hmac.compare_digest(key, given.strip().encode()):
                found = Caller(tenant)
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401, "this server wants an API key that it knows: send the header Authorization: Bearer KEY",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return found

    def salt(self, caller: Caller, cache_salt: str | None) -> str | None:
        """What the prefixes of a request are shared under: only with requests of the same key, and with a salt of the
        client's own only with those that have it too. It tells nothing of either.
        """
        if not self.is_needed and cache_salt is None:
            return None
        parts = [self._keys.get(caller.tenant, b""), b"" if cache_salt is None else b"=" + cache_salt.encode()]
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
