"""Somebody else's OpenAI-compatible server, given by --against URL: whether it is one, and what it calls its model.

Its key goes to it alone: into no file, no table, and not to where it redirects.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hfpaged.errors import HfpagedError, InvalidConfigError

PATIENCE = 30.0  # seconds; a list of models is made of nothing
SHOWN = 200  # characters of what a server says
KEY_VARIABLE = "OPENAI_API_KEY"

ADVICE = "measure with the same model in float32 on both sides: 16 bits alone let greedy texts part"


class EndpointError(HfpagedError, RuntimeError):
    """A server that cannot be asked, refuses, or answers what no OpenAI-compatible server does. `status` is that of
    HTTP, None where it is not the reason.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """`url` is what comes before /v1. `salt` is another one for each run, so that no prompt is one that the server has
    in its cache from the run before.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    salt: str = ""

    @property
    def completions(self) -> str:
        """Where to POST."""
        return f"{self.url}/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


def reach(url: str, key: str | None = None, model: str | None = None) -> Endpoint:
    """The server at `url`, with or without /v1. The first of its models where none is named.

    Raises InvalidConfigError for what is no URL and for a model that it has not, EndpointError where no list of models
    comes from there.
    """
    base = _base_of(url)
    key = _checked(key or os.environ.get(KEY_VARIABLE, ""))
    names = _models(base, Endpoint(base, "", key).headers)
    if model is not None and model not in names:
        raise InvalidConfigError(f"--against-model {model}: {base} has no such model; it has {', '.join(names)}")
    return Endpoint(base, model or names[0], key, secrets.token_hex(4))


def _base_of(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1")
    parts = urlsplit(base)
    is_plain = parts.username is None and not parts.query and not parts.fragment  # each could hold a key
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        told = base.rpartition("@")[2].partition("?")[0].partition("#")[0]
        raise InvalidConfigError(f"--against {told}: give a URL as http://localhost:9000, and a key by {KEY_VARIABLE}")
    return base


def _checked(key: str) -> str | None:
    key = key.strip()  # a file that it was read from may end with a line break
    if not (key.isascii() and key.isprintable()):
        raise InvalidConfigError(
            f"the key of --against-key or {KEY_VARIABLE} has characters that no HTTP header can have"
        )
    return key or None


def _models(base: str, headers: dict[str, str]) -> list[str]:
    where = f"{base}/v1/models"
    data = _get(where, headers)
    try:
        names = [str(model["id"]) for model in json.loads(data)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        told = data[:SHOWN].decode("utf-8", "replace")
        raise EndpointError(
            f"{where} gives no list of models but {told!r}; --against wants an OpenAI-compatible server"
        ) from error
    if not names:
        raise EndpointError(f"{where} lists no model; load one there first")
    return names


def _get(where: str, headers: dict[str, str]) -> bytes:
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(urllib.request.Request(where, headers=headers), timeout=PATIENCE) as answer:
            data: bytes = answer.read()
            return data
    except urllib.error.HTTPError as error:
        raise EndpointError(f"{where} answers {error.code} {error.reason}; {remedy(error.code)}", error.code) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        told = " ".join(str(reason).split())  # it may quote whatever came
        raise EndpointError(f"{where} cannot be asked ({told}); is a server running there?") from error


def remedy(status: int) -> str:
    """What to do about an answer."""
    if status in (401, 403):
        return f"give a key that it takes, by {KEY_VARIABLE} or --against-key"
    if status == 404:
        return "give the URL of an OpenAI-compatible server, up to its /v1"
    return "its log may say why"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
