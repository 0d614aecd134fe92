"""What chat and completions have in common of an answer."""

from __future__ import annotations

import hashlib
import time
import uuid
import weakref
from importlib.metadata import version
from typing import Any

from hfpaged.engine.outputs import SequenceOutput
from hfpaged.serve.schemas.sampling import SamplingBody
from hfpaged.serve.service import Service

_FINGERPRINTS: weakref.WeakKeyDictionary[Service, str] = weakref.WeakKeyDictionary()


def new_id(prefix: str) -> str:
    """A name that nobody can guess: with it requests could be aborted."""
    return f"{prefix}-{uuid.uuid4().hex}"


def answer_head(answer_id: str, kind: str, body: SamplingBody, service: Service) -> dict[str, Any]:
    """What an answer begins with, and each of its chunks."""
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": body.model or service.model_names[0],
        "system_fingerprint": fingerprint(service),
    }


def fingerprint(service: Service) -> str:
    """Changes when the same seed may give other tokens: another model, format or version. Made once for a service."""
    found = _FINGERPRINTS.get(service)
    if found is None:
        told, name = service.batcher.describe(), service.batcher.model.name_or_path
        parts = (version("hfpaged"), name, told["model"], told["kv_format"])
        found = "fp_" + hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:10]
        _FINGERPRINTS[service] = found
    return found


def stop_reason(seq: SequenceOutput | None, own_ends: tuple[int, ...]) -> int | str | None:
    """What the request itself asked to stop at: a text or a token. The model's own end is no such."""
    if seq is None or seq.finish_reason != "stop" or seq.stop_reason in own_ends:
        return None
    return seq.stop_reason
