"""How many replicas there are, and where they run."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.errors import InvalidConfigError

APP_NAME = "hfpaged"


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """Raises InvalidConfigError.

    num_replicas       at the start
    min_replicas, max_replicas   where their number follows the load, else as `num_replicas`
    address            of a Ray cluster that is there; None: one is started on this machine and stopped at the end
    num_gpus, num_cpus   that each replica takes of Ray's account
    app_name, route_prefix   of the application on Ray Serve
    """

    num_replicas: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    address: str | None = None
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    app_name: str = APP_NAME
    route_prefix: str = "/"

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.num_replicas <= self.max_replicas:
            raise InvalidConfigError(
                f"--min-replicas {self.min_replicas}, --replicas {self.num_replicas} and --max-replicas "
                f"{self.max_replicas} are in no order; use 1 <= min <= replicas <= max"
            )
        if self.address is not None and self.address.startswith("ray://"):
            raise InvalidConfigError(
                f"--address {self.address} is Ray Client's, through which replicas are not watched and let end; run "
                "this on a node of the cluster, with --address auto"
            )
        if not self.route_prefix.startswith("/") or (len(self.route_prefix) > 1 and self.route_prefix.endswith("/")):
            raise InvalidConfigError(
                f"--route-prefix {self.route_prefix} is no path that requests can begin with; use / or one such as "
                "/models/small"
            )

    @property
    def is_autoscaled(self) -> bool:
        return self.min_replicas < self.max_replicas
