"""Which steps are traced, and what a trace holds."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import unless, when

LONGEST_NUMBER = 10  # digits of the number of a process
# a window that PROFILE_NOW asks for reads the other keys
ENABLED = when("profile.enabled", True)
WAITS = ENABLED & (when("profile.first_wait", True) | unless("profile.repeat", 1))


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Windows of traced steps, as torch's profiler schedules them; steps are those of one process, counted from 0."""

    enabled: bool = key(False, "trace the windows below")
    skip_first: int = key(1, "steps before the first cycle", span="[0, inf)", read=ENABLED)
    wait: int = key(0, "idle steps at the start of a cycle", span="[0, inf)", read=WAITS)
    first_wait: bool = key(True, "the first cycle waits too", read=ENABLED & when("profile.wait"))
    warmup: int = key(1, "traced steps that are thrown away", span="[0, inf)", read=ENABLED)
    active: int = key(3, "traced steps that are kept", span="[1, inf)")
    repeat: int = key(1, "cycles; 0 = to the end of the run", span="[0, inf)", read=ENABLED)
    processes: str = key("all", "processes that are traced: all, first, or their numbers as in 0,2", read=ENABLED)
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

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and what would be right."""
        return self._processes(), self._advanced()

    def _processes(self) -> Iterator[Problem]:
        if not self.names_processes:
            yield (
                "profile.processes",
                f"'{echo(self.processes)}' is not all, first, or numbers of processes such as 0,2",
            )

    def _advanced(self) -> Iterator[Problem]:
        for word in self.advanced:
            if not all(word.partition("=")[::2]):
                yield "profile.advanced", f"'{echo(word)}' must be written name=value"

    @property
    def names_processes(self) -> bool:
        """Whether `processes` can be read."""
        numbers = all(n.isascii() and n.isdecimal() and len(n) < LONGEST_NUMBER for n in self._numbers)
        return self.processes in ("all", "first") or numbers

    @property
    def _numbers(self) -> list[str]:
        return [number.strip() for number in self.processes.split(",")]
