"""People who chat, for locust: each reads his answer as a stream, and finds fault with one that is not whole."""

from __future__ import annotations

import json
import os
import time

from locust import HttpUser, constant, task

MODEL, KEYS = os.environ["SERVED_MODEL"], os.environ["SERVED_KEYS"].split(",")
TOKENS = 6


class Person(HttpUser):
    wait_time = constant(0.1)
    turn = 0

    def on_start(self):
        Person.turn += 1
        self.headers = {"Authorization": f"Bearer {KEYS[Person.turn % len(KEYS)]}"}

    @task
    def chat(self):
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": f"Tell me a story. {time.time()}"}],
            "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, headers=self.headers, stream=True, catch_response=True, timeout=300
        ) as response:
            lines = [line for line in response.iter_lines() if line]
            fault = _fault(lines) if response.status_code == 200 else f"status {response.status_code}"
            if fault is None:
                response.success()
            else:
                response.failure(fault)
        took = 1000 * (time.perf_counter() - start)
        self.environment.events.request.fire(
            request_type="stream", name="to the last token", response_time=took, response_length=len(lines),
            exception=None, context={},
        )  # fmt: skip
        self.client.get("/v1/models", headers=self.headers)
        self.client.get("/ready")


def _fault(lines):
    """None for a whole answer."""
    if lines[-1] != b"data: [DONE]":
        return f"the last line is {lines[-1]!r}"
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    if reasons[-1] != "length" or any(reasons[:-1]):
        return f"finish reasons {reasons}"
    used = events[-1]["usage"]["completion_tokens"]
    return None if used == TOKENS else f"{used} tokens"
