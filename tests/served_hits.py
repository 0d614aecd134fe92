"""How much of the prompts of some traffic servers have found, as their own counters say."""

from __future__ import annotations

import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

COUNTED = ("hfpaged_prefix_queried_tokens_total", "hfpaged_prefix_hit_tokens_total")


def system_prompts(count: int, each: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations in a mixed order: `each` of each system prompt, with a question of its own."""
    rng = random.Random(seed)
    heads = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=130)) for _ in range(count)]
    found = [
        [{"role": "system", "content": head}, {"role": "user", "content": f"question {number}?"}]
        for number, head in enumerate(heads * each)
    ]
    rng.shuffle(found)
    return found


class Hits(NamedTuple):
    """Of the prompt tokens that requests bring, the share that is not computed; and how many requests each replica has
    answered.
    """

    rate: float
    answered: Counter[str | None]


def hits(client: httpx.Client, bodies: list[dict[str, Any]], at_once: int = 1) -> Hits:
    """Of requests that come in this order, some at once."""
    before, answered = _counted(client), Counter[str | None]()
    with ThreadPoolExecutor(at_once) as threads:
        for answer in threads.map(lambda body: client.post("/v1/chat/completions", json=body), bodies):
            assert answer.status_code == 200, answer.text
            answered[answer.headers.get("x-hfpaged-replica")] += 1
    queried, hit = (after - first for after, first in zip(_counted(client), before, strict=True))
    assert queried > 0
    return Hits(hit / queried, answered)


def _counted(client: httpx.Client) -> list[float]:
    """Of all replicas together."""
    text = client.get("/metrics").text
    return [sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M))) for name in COUNTED]
