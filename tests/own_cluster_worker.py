"""A Ray cluster as `hfpaged serve --replicas` starts one on this machine, and Ray Serve in it: prints the addresses
that its processes listen on, as JSON.
"""

import json
import os
import sys

import psutil
import ray_cluster

from hfpaged import replicas
from hfpaged.replicas.settings import ReplicaSettings


def main(port: int) -> None:
    launch = replicas._launch(alone=True)
    with ray_cluster.patient_start(), launch.cluster.join(ReplicaSettings()):
        launch.cluster.listen("127.0.0.1", port)
        ours = {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)} | {os.getpid()}
        found = [each for each in psutil.net_connections("inet") if each.pid in ours and each.status == "LISTEN"]
        told = [(each.laddr.ip, each.laddr.port) for each in found]
    print(json.dumps(told))


main(int(sys.argv[1]))
