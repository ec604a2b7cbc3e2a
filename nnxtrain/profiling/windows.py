"""Which steps are traced: arithmetic on step numbers, nothing else."""

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
    """Steps whose trace is kept, the last one included; `partial` if the run ends before all of them."""

    first: int
    last: int
    partial: bool


@dataclass(frozen=True)
class ProfileSchedule:
    """Cycles of idle, discarded and kept steps, with the meaning that they have in torch's profiler.

    A step `i` is counted from 0 by the process that takes it, whatever the run did before: a process that resumes a run
    compiles again, and `skip_first` is to leave that out. Steps are counted, however many microbatches they have.

    Attributes:
        skip_first: steps before the first cycle.
        wait: idle steps at the start of each cycle.
        warmup: traced steps that are thrown away; the first use of a tracer is slow.
        active: traced steps that are kept.
        repeat: cycles; 0 repeats to the end.
        first_wait: whether the first cycle waits too.

    Raises:
        TypeError: a number is not whole.
        ValueError: a number is too small; the message names the key.
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
                raise TypeError(f"profile.{name}={value!r} must be a whole number")
            if value < least:
                raise ValueError(f"profile.{name}={value} must be at least {least}")

    @property
    def period(self) -> int:
        """Steps of a cycle."""
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
        """The step at which the first cycle began, or would have begun had it waited."""
        return self.skip_first - (0 if self.first_wait else self.wait)


def make_profile_schedule(config: ProfileConfig) -> ProfileSchedule | None:
    """Returns the schedule of a run, or None if no window was asked for."""
    if not config.enabled:
        return None
    return ProfileSchedule(
        config.skip_first, config.wait, config.warmup, config.active, config.repeat, config.first_wait
    )


def say_windows(config: ProfileConfig, *, start: int, total: int) -> str | None:
    """Returns the windows of a process as people read them, `steps 2 to 4, 7 to 9`; None if none was asked for.

    Args:
        config: what was asked for.
        start: steps done before the process starts; a step is numbered by the steps done before it.
        total: steps that the whole run takes.

    Raises:
        ConfigError: the process, a run's first, ends before its first window.
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
    why = f"no window: step {start + config.first_traced} would be its first, and the run has {total}"
    if not start:
        raise ConfigError(f"profile.skip_first={config.skip_first}: {why}")
    return why
