"""Runs of several processes."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when

CONNECTED = when("distributed.coordinator")
JOINED = when("distributed.detect", True) | CONNECTED


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes of a run, and how long they wait for each other."""

    detect: bool = key(
        False,
        "let jax detect coordinator and processes (SLURM, Open MPI, Kubernetes, TPU); the keys below take precedence",
    )
    coordinator: str | None = key(None, "HOST:PORT of process 0, to which all processes connect")
    processes: int = key(1, "number of processes", span="[1, 1048576]", read=CONNECTED)
    process: int = key(0, "index of this process, from 0", span="[0, 1048576]", read=CONNECTED)
    connect_timeout_s: int = key(
        300, "seconds to wait for the other processes at the start", span="[1, 1000000]", read=JOINED
    )
    heartbeat_timeout_s: int = key(
        100,
        "seconds without a heartbeat after which a process counts as lost and the others end",
        span="[5, 1000000]",
        read=JOINED,
    )

    @property
    def is_joined(self) -> bool:
        """Whether this process connects to others."""
        return self.detect or self.coordinator is not None

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._process(), self._meeting(), self._coordinator()

    def _process(self) -> Iterator[Problem]:
        if self.coordinator is not None and self.process >= self.processes and not self.detect:
            yield "distributed.process", f"{self.process} must be below distributed.processes={self.processes}"

    def _meeting(self) -> Iterator[Problem]:
        if self.processes > 1 and not self.is_joined:
            how = "set distributed.coordinator=HOST:PORT or distributed.detect=true"
            yield "distributed.processes", f"{self.processes} processes need a coordinator; {how}"

    def _coordinator(self) -> Iterator[Problem]:
        if self.coordinator is None:
            return
        host, colon, port = self.coordinator.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
        if not (host and colon and is_port):
            yield "distributed.coordinator", f"'{echo(self.coordinator)}' is not HOST:PORT"
