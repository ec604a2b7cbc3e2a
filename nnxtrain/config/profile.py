"""Which steps are traced, and what a trace contains."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import unless, when

LONGEST_NUMBER = 10  # digits of the number of a process
# keys without a condition are read by windows that PROFILE_NOW requests, too
ENABLED = when("profile.enabled", True)
WAITS = ENABLED & (when("profile.first_wait", True) | unless("profile.repeat", 1))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Windows of traced steps, scheduled as in torch.profiler; steps are counted from 0 since this start of the run."""

    enabled: bool = key(False, "trace the steps that the keys below select")
    skip_first: int = key(1, "steps before the first cycle", span="[0, inf)", read=ENABLED)
    wait: int = key(0, "untraced steps at the start of each cycle", span="[0, inf)", read=WAITS)
    first_wait: bool = key(True, "the first cycle has wait steps too", read=ENABLED & when("profile.wait"))
    warmup: int = key(1, "traced steps of each cycle that are discarded", span="[0, inf)", read=ENABLED)
    active: int = key(3, "traced steps of each window that are kept", span="[1, inf)")
    repeat: int = key(1, "number of cycles; 0 = until the end of the run", span="[0, inf)", read=ENABLED)
    processes: str = key("all", "processes to trace: all, first, or their indices such as 0,2", read=ENABLED)
    host_tracer_level: int = key(2, "detail of host events (jax.profiler.ProfileOptions)", span="[1, 3]")
    python_tracer_level: int = key(0, "1 = trace every Python call too, which is slow and large", span="[0, 1]")
    advanced: tuple[str, ...] = key(
        (), "name=value options of the platform's tracer (advanced_configuration of jax.profiler.ProfileOptions)"
    )
    memory: str = key(
        "on_oom",
        "write a device memory profile (pprof): never, when memory runs out, or at the end of each window too",
        choices=("never", "each_window", "on_oom"),
    )
    server_port: int = key(
        0, "port of jax.profiler.start_server, for traces requested by tools such as xprof; 0 = none", span="[0, 65535]"
    )

    @property
    def first_traced(self) -> int:
        """The first step whose trace is kept."""
        return self.skip_first + self.warmup + (self.wait if self.first_wait else 0)

    def is_traced(self, process: int) -> bool:
        """Tells whether a process writes traces."""
        if self.processes in ("all", "first"):
            return self.processes == "all" or process == 0
        return process in map(int, self._numbers)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._processes(), self._advanced()

    def _processes(self) -> Iterator[Problem]:
        if not self.names_processes:
            yield (
                "profile.processes",
                f"'{echo(self.processes)}' is not all, first, or indices of processes such as 0,2",
            )

    def _advanced(self) -> Iterator[Problem]:
        for word in self.advanced:
            if not all(word.partition("=")[::2]):
                yield "profile.advanced", f"'{echo(word)}' must have the form name=value"

    @property
    def names_processes(self) -> bool:
        """Whether `processes` is well formed."""
        numbers = all(n.isascii() and n.isdecimal() and len(n) < LONGEST_NUMBER for n in self._numbers)
        return self.processes in ("all", "first") or numbers

    @property
    def _numbers(self) -> list[str]:
        return [number.strip() for number in self.processes.split(",")]
