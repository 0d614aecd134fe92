"""What the ingress tells the router of a request: under which hashes its prefixes are known."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from hfpaged.replicas.recipe import Recipe
from hfpaged.serve.callers import KeyRing


class Hashing:
    """Of one model."""

    def __init__(self, recipe: Recipe, keys: KeyRing) -> None:
        self._recipe, self._keys = recipe, keys

    async def of(self, scope: Scope, body: bytes) -> Sequence[str]:
        """The hashes of the full blocks of a prompt, the first block's first."""
        return ()
