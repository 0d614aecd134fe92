"""The Ray cluster that `hfpaged serve --replicas` starts where none is given."""

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import ray_cluster


def test_nobody_on_another_machine_reaches_a_cluster_of_our_own_and_it_gives_way_to_no_other_program():
    """Whoever reaches Ray's ports runs what he likes there. Its workers are those that compute."""
    port = ray_cluster.free_port()
    with ray_cluster.one_at_a_time(), ray_cluster.short_folder() as folder:
        environment = {**os.environ, **ray_cluster.VARIABLES, "RAY_TMPDIR": folder}
        del environment["RAY_worker_niceness"]  # what hfpaged does itself
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("own_cluster_worker.py")), str(port)],
            env=environment, capture_output=True, text=True, timeout=ray_cluster.PATIENCE, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert len(set(told["nice"])) == 1, told["nice"]
    assert told["loaded"] == [], "whoever starts replicas has no model, and waits for no model's libraries"
    listening = told["listening"]
    assert port in [each for _, each in listening]
    assert len(listening) > 5, "Ray's own are missing"
    addresses = {ipaddress.ip_address(address.removeprefix("::ffff:")) for address, _ in listening}
    assert all(address.is_loopback for address in addresses), listening
