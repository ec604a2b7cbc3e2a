"""Which steps are traced: pure arithmetic on step numbers."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from nnxtrain.config.profile import ProfileConfig
from nnxtrain.errors import ConfigError


class Phase(StrEnum):
    """Whether and how a step is traced."""

    IDLE = "idle"
    WARMUP = "warmup"
    RECORD = "record"
    RECORD_LAST = "record_last"


class Window(NamedTuple):
    """First and last step of a kept trace, both included; `partial` if the run ends before all of its steps."""

    first: int
    last: int
    partial: bool


@dataclass(frozen=True)
class ProfileSchedule:
    """Cycles of untraced, discarded and kept steps, as in torch.profiler.

    Steps `i` are counted from 0 since the process started, also when it resumes a run: it then compiles again, which
    `skip_first` leaves out. Steps are counted, not microbatches.

    Attributes:
        skip_first: steps before the first cycle.
        wait: untraced steps at the start of each cycle.
        warmup: traced steps that are discarded; a tracer is slow at first.
        active: traced steps that are kept.
        repeat: number of cycles; 0 repeats until the end.
        first_wait: whether the first cycle has `wait` steps too.

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is too small; the message names the key.
    """

    skip_first: int = 1
    wait: int = 0
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    first_wait: bool = True

    def __post_init__(self) -> None:
        for name, least in {"skip_first": 0, "wait": 0, "warmup": 0, "active": 1, "repeat": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"profile.{name}={value!r} must be an integer")
            if value < least:
                raise ValueError(f"profile.{name}={value} must be at least {least}")

    @property
    def period(self) -> int:
        """Number of steps in a cycle."""
        return self.wait + self.warmup + self.active

    def cycle(self, i: int) -> int | None:
        """Returns the cycle that step `i` belongs to, or None before the first and after the last."""
        cycle = (i - self._origin) // self.period
        return cycle if i >= self.skip_first and not 0 < self.repeat <= cycle else None

    def phase(self, i: int) -> Phase:
        """Returns the phase of step `i`."""
        if self.cycle(i) is None:
            return Phase.IDLE
        place = (i - self._origin) % self.period
        if place < self.wait:
            return Phase.IDLE
        if place < self.wait + self.warmup:
            return Phase.WARMUP
        return Phase.RECORD_LAST if place == self.period - 1 else Phase.RECORD

    def windows(self, total: int) -> Iterator[Window]:
        """Yields the windows of a process that takes `total` steps."""
        for cycle in range(self.repeat) if self.repeat else itertools.count():
            first = self._origin + cycle * self.period + self.wait + self.warmup
            if first >= total:
                return
            end = first + self.active
            yield Window(first, min(end, total) - 1, end > total)

    @property
    def _origin(self) -> int:
        """The step at which the first cycle begins, or would have begun with its `wait` steps."""
        return self.skip_first - (0 if self.first_wait else self.wait)


def make_profile_schedule(config: ProfileConfig) -> ProfileSchedule | None:
    """Returns the schedule of a run, or None if profiling is not enabled."""
    if not config.enabled:
        return None
    return ProfileSchedule(
        config.skip_first, config.wait, config.warmup, config.active, config.repeat, config.first_wait
    )


def say_windows(config: ProfileConfig, *, start: int, total: int) -> str | None:
    """Returns the windows of a process as text, `steps 2 to 4, 7 to 9`; None if profiling is not enabled.

    Args:
        config: which steps to trace.
        start: steps of the run done before this process started.
        total: steps of the whole run.

    Raises:
        ConfigError: a new run ends before its first window.
    """
    schedule, left = make_profile_schedule(config), total - start
    if schedule is None or not left:
        return None
    shown = [
        f"{start + first} to {start + last}{' (partial)' if partial else ''}"
        for first, last, partial in itertools.islice(schedule.windows(left), 4)
    ]
    if shown:
        return f"steps {', '.join(shown[:3])}{', and so on' if len(shown) > 3 else ''}"
    why = f"no window: its first step would be {start + config.first_traced}, and the run has {total}"
    if not start:
        raise ConfigError(f"profile.skip_first={config.skip_first}: {why}")
    return why
