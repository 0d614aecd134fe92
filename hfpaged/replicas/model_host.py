"""What a replica has: a model with its pool and its batcher, and the application of hfpaged.serve around them. Only
replicas import this: it loads torch and transformers, for seconds, which those who start replicas do without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil

from hfpaged.engine.batcher import ContinuousBatcher
from hfpaged.engine.sizing import SHARE_ON_CPU
from hfpaged.replicas.hosting import Hosted
from hfpaged.replicas.load import Load, load_of
from hfpaged.replicas.recipe import Recipe
from hfpaged.replicas.reporting import Reporter
from hfpaged.serve.adapters import load_adapters
from hfpaged.serve.app import build_app, paths
from hfpaged.serve.launch import load_model
from hfpaged.serve.service import Service
from hfpaged.serve.start_figures import figures


class ModelHost:
    """Of the replica with this `name`. It loads the model, which takes long, and raises what loading raises. It has
    begun when `hosted` has been started and `service` is warm.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        assert recipe.options.salt_secret is not None
        self._batcher = _load(recipe)
        most_queued = recipe.sizes.get("max_num_queued_requests")
        self._reporter = Reporter(self._batcher, recipe.options.salt_secret, most_queued)
        app = build_app(self._batcher, _own_options(recipe, name))
        self.service: Service = app.state.service
        self.hosted = Hosted(app, lambda: app.router.lifespan_context(app))

    def facts(self) -> dict[str, Any]:
        """What does not change: sizes, and the paths that are answered."""
        told = figures(self._batcher, self.service.options, "")
        return {**told, "max_body_bytes": self.service.max_body_bytes, "paths": paths()}

    def load(self) -> Load:
        """Now."""
        return load_of(self._batcher)

    def routing_stats(self) -> dict[str, Any]:
        """See `Reporter.stats`."""
        return self._reporter.stats()

    def close(self) -> None:
        """Give the model's memory back."""
        self._batcher.close()


def _own_options(recipe: Recipe, name: str) -> Any:
    """No two processes write into one file."""
    record = recipe.options.record
    return recipe.options if record is None else replace(recipe.options, record=f"{record}.{name}")


def _load(recipe: Recipe) -> ContinuousBatcher:
    model, tokenizer = load_model(recipe.model, recipe.dtype, recipe.device, trust_remote_code=recipe.trust_remote_code)
    model = load_adapters(model, recipe.options.adapters)
    return ContinuousBatcher(model, tokenizer, **_sizes(recipe, next(model.parameters()).device.type))


def _sizes(recipe: Recipe, device: str) -> dict[str, Any]:
    """A machine's memory is shared by all replicas on it, each of which would take half of it for itself: together they
    take half of what is free now that the weights are there.
    """
    sizes = dict(recipe.sizes)
    if device == "cpu" and recipe.neighbours > 1 and sizes.get("memory") is None and "num_blocks" not in sizes:
        sizes["memory"] = int(SHARE_ON_CPU * psutil.virtual_memory().available / recipe.neighbours)
    return sizes
