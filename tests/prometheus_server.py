"""A real Prometheus on a loopback port, with what is shipped, only faster."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

from hfpaged.telemetry.exporting import export

STARTS_IN = 120.0  # seconds; it takes one or two where nothing else runs
EVERY = "2s"  # and a scrape may take as long


class Prometheus:
    """Asks its HTTP API."""

    def __init__(self, url):
        self.url = url

    def get(self, path, **params):
        """The data of an answer; what it refuses raises."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{params}: {error.read().decode()}") from error

    def query(self, expression):
        return self.get("query", query=expression)["result"]

    def targets(self):
        return self.get("targets")["activeTargets"]

    def firing(self, name):
        alerts = self.get("alerts")["alerts"]
        return [alert for alert in alerts if alert["labels"]["alertname"] == name and alert["state"] == "firing"]


def until(question, wanted="so", seconds=60.0):
    """What `question()` answers once it is true: a scrape that was late leaves no series for a moment."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < end, f"not {wanted} within {seconds:g} s"
        time.sleep(0.1)
    return answer


@contextmanager
def running(folder, target):
    """Prometheus with the shipped configuration, for another target and in shorter times."""
    export(folder)
    for name in ("prometheus.yml", "alerts.yml"):
        (folder / name).write_text(faster((folder / name).read_text(), target))
    address = f"127.0.0.1:{free_port()}"
    words = [
        "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    with open(folder / "log", "w") as log, subprocess.Popen(words, cwd=folder, stdout=log, stderr=log) as process:
        try:
            prometheus = Prometheus(f"http://{address}")
            until(lambda: is_ready(prometheus, process, folder / "log"), seconds=STARTS_IN)
            yield prometheus
        finally:
            process.terminate()


def faster(text, target):
    text = text.replace("host.docker.internal:9464", target).replace("localhost:9464", target)
    text = re.sub(r"\b(scrape_interval|evaluation_interval|interval): \w+", rf"\1: {EVERY}", text)
    return re.sub(r"\bfor: \w+", "for: 1s", text)


def is_ready(prometheus, process, log):
    assert process.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5):
            return True
    except OSError:  # not yet, or it says 503
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
