"""/v1/kv/stats: one look at a batcher, with what is remembered of its last minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from hfpaged.clock import now
from hfpaged.engine.events import PrefixMatched
from hfpaged.engine.request import Request
from hfpaged.serve.callers import Caller
from hfpaged.serve.kv.advice import Advice
from hfpaged.serve.kv.block_runs import Holder, holders_of, map_record
from hfpaged.serve.kv.figures import latency_totals, pool_figures, prefix_figures, totals
from hfpaged.serve.kv.recent import RATE_SECONDS, WINDOW, Recent, Sample, quantiles
from hfpaged.serve.kv.request_rows import MOST_ROWS, Eyes, request_rows
from hfpaged.serve.kv.words import reason_told, sentence
from hfpaged.serve.service import Service
from hfpaged.telemetry.batcher_readings import PREEMPTED, RUNNING, WAITING
from hfpaged.telemetry.collector import read_one

SHARES = (0.5, 0.9, 0.99)


class Live:
    """Of one service. `look` may be called in any thread, and takes milliseconds."""

    def __init__(self, service: Service) -> None:
        self._service, self._batcher = service, service.batcher
        self._recent = Recent(service.batcher.pool.blocks)
        self._advice = Advice(service.batcher)
        self._began = now()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember, from start to end of the application."""
        self._began = now()
        self._batcher.hooks.append(self._recent)
        try:
            yield
        finally:
            with suppress(ValueError):  # somebody has cleared them
                self._batcher.hooks.remove(self._recent)

    def look(self, caller: Caller, since: float = 0.0) -> dict[str, Any]:
        """All that `caller` may know; of the history the seconds from `since` on."""
        sums = read_one(self._batcher).of(self._batcher.tally.model_name)
        numbers, pool = sums.numbers, self._batcher.pool
        eyes = Eyes(caller.tenant, sees_all=not self._service.options.api_keys)
        requests = dict(self._batcher.loop.requests)
        memory = self._batcher.memory_map()
        holders = holders_of(memory, requests)
        rows = request_rows(requests.values(), holders, memory.block_bytes, eyes)
        running, waiting = int(numbers[RUNNING]), int(numbers[WAITING])
        return {
            "object": "kv.stats",
            "time": now(),
            "uptime_seconds": now() - self._began,
            "models": list(self._service.model_names),
            "accepts": self._accepts(),
            "limits": self._batcher.limits,
            "pool": pool_figures(numbers, pool),
            "memory_map": {
                **map_record(memory, holders),
                "names": [_name(holder, requests, eyes) for holder in holders],
            },
            "requests": {
                "running": running, "waiting": waiting, "preempted": int(numbers[PREEMPTED]),
                "list": rows[:MOST_ROWS], "not_listed": max(len(rows) - MOST_ROWS, 0),
            },
            "prefixes": prefix_figures(numbers) | self._recent_prefixes() | {"misses": self._misses(eyes)},
            "throughput": self._throughput(),
            "latency": self._latency(latency_totals(sums)),
            "totals": totals(numbers),
            "doctor": self._advice.record(),
            "history": [asdict(second) for second in self._recent.seconds(since)],
        }  # fmt: skip

    def _accepts(self) -> str:
        """What prompts can be made of at best."""
        tokenizer = self._batcher.tokenizer
        if tokenizer is None:
            return "token ids"
        return "messages" if tokenizer.chat_template else "text"

    def _throughput(self) -> dict[str, float]:
        prefill, decode = self._recent.rates()
        return {"window_seconds": RATE_SECONDS, "prefill_tokens_per_second": prefill,
                "decode_tokens_per_second": decode}  # fmt: skip

    def _recent_prefixes(self) -> dict[str, Any]:
        queried, hit = self._recent.prefixes()
        return {"recent": {"window_seconds": WINDOW, "queried_tokens": queried, "hit_tokens": hit,
                           "hit_rate": hit / queried if queried else None}}  # fmt: skip

    def _latency(self, since_start: dict[str, dict[str, float]]) -> dict[str, Any]:
        return {
            "window_seconds": WINDOW,
            "time_to_first_token": _percentiles(self._recent.first_tokens()) | since_start["time_to_first_token"],
            "inter_token": _percentiles(self._recent.gaps()) | since_start["inter_token"],
        }

    def _misses(self, eyes: Eyes) -> list[dict[str, Any]]:
        return [self._miss(event, eyes) for event in self._recent.misses() if eyes.may_see(event.tenant)]

    def _miss(self, event: PrefixMatched, eyes: Eyes) -> dict[str, Any]:
        reason = reason_told(event, may_know_others=eyes.sees_all)
        return {
            "time": event.time, "request_id": event.request_id, "tenant": event.tenant, "hit_tokens": event.hit,
            "queried_tokens": event.queried, "reason": reason,
            "explanation": sentence(event, reason, self._batcher.pool.block_size),
        }  # fmt: skip


def _name(holder: Holder, requests: dict[str, Request], eyes: Eyes) -> str | None:
    """Of who holds blocks; None for another tenant's request."""
    request = requests.get(holder.name) if holder.kind == "request" else None
    tenant = None if request is None else request.tenant
    return holder.name if eyes.sees_all or (tenant is not None and eyes.may_see(tenant)) else None


def _percentiles(samples: list[Sample]) -> dict[str, float | None]:
    """Seconds, None before there is any."""
    found = zip(SHARES, quantiles(samples, SHARES), strict=True)
    return {"count": sum(sample.times for sample in samples), **{f"p{share * 100:.0f}": each for share, each in found}}
