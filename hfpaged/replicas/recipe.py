"""What each replica is made of, as it is sent to the machine where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfpaged.serve.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`model` is a folder or a hub id that every machine can read, None the demo model; `dtype`, `device` and
    `trust_remote_code` as `hfpaged.serve.run` takes them; `sizes` are arguments of ContinuousBatcher; `environment` are
    variables that are set before anything is loaded; `neighbours` is how many replicas there may be on one machine,
    this one among them. Of `options`, `salt_secret` is given: salts of all replicas must agree.
    """

    options: ServeOptions
    model: str | None = None
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)
    neighbours: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    log_level: str = "info"
    log_json: bool = False
