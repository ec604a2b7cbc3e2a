"""Several processes."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Who takes part in a run of several processes, and how long they wait for each other."""

    detect: bool = key(False, "ask the cluster (SLURM, Open MPI, Kubernetes, TPU) who takes part; the keys below win")
    coordinator: str | None = key(None, "HOST:PORT of process 0, where all processes meet")
    processes: int = key(1, "processes of the run", span="[1, inf)")
    process: int = key(0, "number of this process, from 0", span="[0, inf)")
    connect_timeout_s: int = key(300, "seconds that processes wait for each other at the start", span="[1, inf)")
    heartbeat_timeout_s: int = key(
        100, "seconds without a sign of life after which a process is lost and the others end", span="[5, inf)"
    )

    @property
    def is_joined(self) -> bool:
        """Whether this process meets others."""
        return self.detect or self.coordinator is not None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.process >= self.processes and not self.detect:
            yield "distributed.process", f"{self.process} must be below distributed.processes={self.processes}"
        if self.processes > 1 and not self.is_joined:
            meet = "give distributed.coordinator=HOST:PORT or distributed.detect=true"
            yield "distributed.processes", f"{self.processes} processes must meet; {meet}"
        host, colon, port = (self.coordinator or "host:1").rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
            yield "distributed.coordinator", f"{self.coordinator!r} is not HOST:PORT"
