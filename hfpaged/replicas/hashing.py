"""What the ingress tells the router of a request: under which hashes its prefix is known."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope

from hfpaged import demo_model
from hfpaged.conditions import quiet_transformers
from hfpaged.replicas.prompt_hashes import PromptHashes
from hfpaged.replicas.recipe import Recipe

NONE = b""


class Hashing:
    """Of a recipe's model, which is not loaded for it; `block_size` is that of the replicas' pools."""

    def __init__(self, recipe: Recipe, block_size: int) -> None:
        self._hashes: PromptHashes | None = None
        if recipe.sizes.get("prefix_sharing", True):
            self._hashes = PromptHashes(_tokenizer(recipe), recipe.options, block_size)

    async def of(self, scope: Scope, path: str, body: bytes) -> bytes:
        """See `PromptHashes.of`; none where replicas share no prefixes. `path` is that within the application."""
        if self._hashes is None or scope["method"] != "POST":
            return NONE
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return await asyncio.to_thread(self._hashes.of, path, body, given.decode("latin-1"))


def _tokenizer(recipe: Recipe) -> Any:
    with quiet_transformers():
        return demo_model.load_tokenizer(
            demo_model.path() if recipe.model is None else recipe.model, trust_remote_code=recipe.trust_remote_code
        )
