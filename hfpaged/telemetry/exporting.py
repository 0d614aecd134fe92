"""The files that are shipped for Grafana, Prometheus and Jaeger, and how they get into a folder of one's own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

from hfpaged.errors import InvalidConfigError

# All of them, each with what it is for.
SHIPPED = {
    "grafana-dashboard.json": "the dashboard, for Grafana 10 and later",
    "alerts.yml": "alert rules for Prometheus",
    "alerts_test.yml": "their tests: promtool test rules alerts_test.yml",
    "prometheus.yml": "what Prometheus scrapes, and which rules it reads",
    "compose.yml": "Jaeger, Prometheus and Grafana in containers",
    "grafana-datasources.yml": "used by compose.yml: where Grafana reads from",
    "grafana-provider.yml": "used by compose.yml: where Grafana finds the dashboard",
    "traces.md": "how to look at traces in Jaeger",
}

State = Literal["written", "replaced", "unchanged"]


class Exported(NamedTuple):
    """A file, and what became of it."""

    name: str
    state: State


def read_shipped(name: str) -> bytes:
    """One of SHIPPED."""
    return files("hfpaged.telemetry").joinpath("shipped", name).read_bytes()


def export(folder: str | os.PathLike[str], *, force: bool = False) -> list[Exported]:
    """Write all that is shipped into a folder, made where there is none. Files of other contents are replaced with
    `force` only; without it nothing is written if there is one.

    Raises InvalidConfigError for such files, and for what cannot be written.
    """
    place = Path(folder)
    try:
        found = {name: _present(place / name) for name in SHIPPED}
        changed = [name for name, old in found.items() if old is not None and old != read_shipped(name)]
        if changed and not force:
            raise InvalidConfigError(_refusal(place, changed))
        place.mkdir(parents=True, exist_ok=True)
        return [Exported(name, _write(place / name, old, read_shipped(name))) for name, old in found.items()]
    except OSError as error:
        raise InvalidConfigError(f"{error.filename}: {error.strerror}; give a folder that can be written") from error


def _present(path: Path) -> bytes | None:
    """What stands there, None where nothing does."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, old: bytes | None, new: bytes) -> State:
    """The file is there as a whole or not at all."""
    if old == new:
        return "unchanged"
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(new)  # readable as the umask says: in containers somebody else reads it
    part.replace(path)
    return "written" if old is None else "replaced"


def _refusal(place: Path, changed: Iterable[str]) -> str:
    names = list(changed)
    differ = "differs" if len(names) == 1 else "differ"
    return (
        f"{', '.join(names)} in {place} {differ} from what is shipped ({len(names)} of {len(SHIPPED)} files), and what "
        "was changed is kept; use --force to replace it, or another folder"
    )
