"""Which steps are traced, and what a trace holds."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Windows of traced steps, as torch's profiler schedules them; steps are those of one process, counted from 0."""

    enabled: bool = key(False, "trace the windows below")
    skip_first: int = key(1, "steps before the first cycle", span="[0, inf)")
    wait: int = key(0, "idle steps at the start of a cycle", span="[0, inf)")
    first_wait: bool = key(True, "the first cycle waits too")
    warmup: int = key(1, "traced steps that are thrown away", span="[0, inf)")
    active: int = key(3, "traced steps that are kept", span="[1, inf)")
    repeat: int = key(1, "cycles; 0 = to the end of the run", span="[0, inf)")
    processes: str = key("all", "processes that are traced: all, first, or their numbers as in 0,2")
    host_tracer_level: int = key(2, "detail of the host's events", span="[1, 3]")
    python_tracer_level: int = key(0, "1 = trace every call of Python too, which is slow and large", span="[0, 1]")
    advanced: tuple[str, ...] = key((), "options of the platform's tracer, name=value")
    memory: str = key(
        "on_oom",
        "what lies in device memory, as a pprof file: when memory runs out, at the end of each window too, or never",
        choices=("never", "each_window", "on_oom"),
    )
    server_port: int = key(0, "port for tools that ask for a trace from outside; 0 = none", span="[0, 65535]")

    @property
    def first_traced(self) -> int:
        """The first step whose trace is kept."""
        return self.skip_first + self.warmup + (self.wait if self.first_wait else 0)

    def is_traced(self, process: int) -> bool:
        """Tells whether a process writes traces."""
        if self.processes in ("all", "first"):
            return self.processes == "all" or process == 0
        return process in map(int, self._numbers)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        if self.processes not in ("all", "first") and not all(number.isdecimal() for number in self._numbers):
            yield "profile.processes", f"{self.processes!r} is not all, first, or numbers of processes such as 0,2"
        for word in self.advanced:
            if not all(word.partition("=")[::2]):
                yield "profile.advanced", f"{word!r} must be written name=value"

    @property
    def _numbers(self) -> list[str]:
        return [number.strip() for number in self.processes.split(",")]
