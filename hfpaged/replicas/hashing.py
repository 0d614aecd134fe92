"""What the ingress tells the router of a request: under which hashes its prefix is known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import Scope

from hfpaged.replicas.prompt_hashes import PromptHashes
from hfpaged.replicas.recipe import Recipe

NONE = b""


class Hashing:
    """Of a recipe's model, which is not loaded for it; `tokenizer` is what `load_tokenizer` gives, and `block_size`
    that of the replicas' pools.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any, block_size: int) -> None:
        self._hashes = PromptHashes(tokenizer, recipe.options, block_size) if _share_prefixes(recipe) else None

    async def of(self, scope: Scope, path: str, body: bytes) -> bytes:
        """See `PromptHashes.of`; none where replicas share no prefixes. `path` is that within the application."""
        if self._hashes is None or scope["method"] != "POST":
            return NONE
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return await asyncio.to_thread(self._hashes.of, path, body, given.decode("latin-1"))


def load_tokenizer(recipe: Recipe) -> Any:
    """That of a recipe's model, None where replicas share no prefixes; it takes seconds. Raises DemoModelError."""
    if not _share_prefixes(recipe):
        return None
    from hfpaged.conditions import quiet_transformers  # torch, which those who only start an ingress do without
    from hfpaged.tokenizer_loading import load_tokenizer

    with quiet_transformers():
        name = _demo_folder() if recipe.model is None else recipe.model
        return load_tokenizer(name, trust_remote_code=recipe.trust_remote_code)


def _demo_folder() -> Path:
    from hfpaged import demo_model  # the code of models, which no other model's tokenizer needs

    return demo_model.path()


def _share_prefixes(recipe: Recipe) -> bool:
    return bool(recipe.sizes.get("prefix_sharing", True))
