"""A Ray cluster as `hfpaged serve --replicas` starts one on this machine, and Ray Serve in it: prints the addresses
that its processes listen on, how much they give way to others, and what the starting one has loaded, as JSON.
"""

import json
import sys

import psutil
import ray_cluster

from hfpaged import replicas
from hfpaged.replicas.settings import ReplicaSettings


def main(port: int) -> None:
    launch = replicas._launch(alone=True)
    loaded = sorted({"torch", "numba"} & set(sys.modules))
    with ray_cluster.patient_start(), launch.cluster.join(ReplicaSettings()):
        launch.cluster.listen("127.0.0.1", port)
        ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
        pids, nice = {process.pid for process in ours}, [process.nice() for process in ours if process.is_running()]
        found = [each for each in psutil.net_connections("inet") if each.pid in pids and each.status == "LISTEN"]
        told = [(each.laddr.ip, each.laddr.port) for each in found]
    print(json.dumps({"listening": told, "nice": nice, "loaded": loaded}))


main(int(sys.argv[1]))
