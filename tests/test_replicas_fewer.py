"""A replica that is wanted no more lets its answers end before it goes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import httpx
import ray_cluster
import serve_models

READERS = 2  # of 4 that one replica takes at once
DOWN_SECONDS = "15"  # that one idles; both are asked long before


def test_where_fewer_replicas_are_wanted_one_goes_and_every_answer_is_whole(tmp_path):
    port = ray_cluster.free_port()
    words = [
        str(serve_models.save(tmp_path)), "--replicas", "2", "--min-replicas", "1", "--max-replicas", "2",
        "--port", str(port), "--kv-cache-memory", "3MiB", "--max-num-seqs", str(2 * READERS), "--device", "cpu",
    ]  # fmt: skip
    with (
        ray_cluster.one_at_a_time(),
        ray_cluster.short_folder() as folder,
        patch.dict(os.environ, RAY_TMPDIR=folder, DOWN_SECONDS=DOWN_SECONDS),
        ray_cluster.driver(*words) as driver,
    ):
        driver.wait_for(r"ready: ")
        answered = _read_until_one_is_left(f"http://127.0.0.1:{port}")
        assert len(answered) == 2, "one has gone before anybody asked it"
        assert driver.stop() == 0


def _read_until_one_is_left(url):
    """How many answers each replica has given."""
    answered, is_over = Counter(), threading.Event()

    def read(number):
        body = {"max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=url, timeout=ray_cluster.PATIENCE) as client:
            while not is_over.is_set():
                prompt = f"{number} has read {answered.total()} answers"
                answer = client.post("/v1/completions", json={**body, "prompt": prompt})
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"error"' not in answer.text
                answered[answer.headers["x-hfpaged-replica"]] += 1

    with ThreadPoolExecutor(READERS) as threads, httpx.Client(base_url=url, timeout=ray_cluster.PATIENCE) as client:
        reading = [threads.submit(read, number) for number in range(READERS)]
        try:
            ray_cluster.wait_patiently(
                lambda: len(ray_cluster.replicas(client)) == 1 or any(each.done() for each in reading)
            )
        finally:
            is_over.set()
        for each in reading:
            each.result(ray_cluster.PATIENCE)
    return answered
