"""Several processes."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when

TOLD = when("distributed.coordinator")
JOINED = when("distributed.detect", True) | TOLD


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Who takes part in a run of several processes, and how long they wait for each other."""

    detect: bool = key(False, "ask the cluster (SLURM, Open MPI, Kubernetes, TPU) who takes part; the keys below win")
    coordinator: str | None = key(None, "HOST:PORT of process 0, where all processes meet")
    processes: int = key(1, "processes of the run", span="[1, 1048576]", read=TOLD)
    process: int = key(0, "number of this process, from 0", span="[0, 1048576]", read=TOLD)
    connect_timeout_s: int = key(
        300, "seconds that processes wait for each other at the start", span="[1, 1000000]", read=JOINED
    )
    heartbeat_timeout_s: int = key(
        100,
        "seconds without a sign of life after which a process is lost and the others end",
        span="[5, 1000000]",
        read=JOINED,
    )

    @property
    def is_joined(self) -> bool:
        """Whether this process meets others."""
        return self.detect or self.coordinator is not None

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and what would be right."""
        return self._process(), self._meeting(), self._coordinator()

    def _process(self) -> Iterator[Problem]:
        if self.coordinator is not None and self.process >= self.processes and not self.detect:
            yield "distributed.process", f"{self.process} must be below distributed.processes={self.processes}"

    def _meeting(self) -> Iterator[Problem]:
        if self.processes > 1 and not self.is_joined:
            meet = "give distributed.coordinator=HOST:PORT or distributed.detect=true"
            yield "distributed.processes", f"{self.processes} processes must meet; {meet}"

    def _coordinator(self) -> Iterator[Problem]:
        if self.coordinator is None:
            return
        host, colon, port = self.coordinator.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
        if not (host and colon and is_port):
            yield "distributed.coordinator", f"'{echo(self.coordinator)}' is not HOST:PORT"
