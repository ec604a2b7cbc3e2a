"""The learning-rate schedule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when

DECAYS = when("schedule.name", "cosine", "linear", "wsd")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, then a curve. The formulas are in `optim/schedules.py`."""

    name: str = key(
        "cosine", "curve after the warm-up", choices=("constant", "cosine", "inverse_sqrt", "linear", "wsd")
    )
    warmup_steps: int = key(0, "warm-up, in updates", span="[0, inf)")
    warmup_fraction: float | None = key(None, "warm-up as a fraction of steps, instead of warmup_steps", span="[0, 1]")
    decay_steps: int | None = key(
        None,
        "decay, in updates, from the peak on, for wsd up to the end; null = all that remain, for wsd a tenth of steps",
        span="[0, inf)",
        read=DECAYS,
    )
    decay_fraction: float | None = key(
        None, "decay as a fraction of steps, instead of decay_steps", span="[0, 1]", read=DECAYS
    )
    final_fraction: float = key(
        0.1,
        "final learning rate as a fraction of the peak",
        span="[0, 1]",
        read=DECAYS | when("schedule.name", "inverse_sqrt"),
    )

    def warmup(self, steps: int) -> int:
        """Returns the updates of the warm-up in a run of `steps` steps."""
        return self.warmup_steps if self.warmup_fraction is None else share_of(self.warmup_fraction, steps)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return (
            _twice("warmup", self.warmup_steps or None, self.warmup_fraction, off="0"),
            _twice("decay", self.decay_steps, self.decay_fraction, off="null"),
        )


def share_of(fraction: float, steps: int) -> int:
    """Returns a fraction of the steps, rounded to a whole number."""
    return math.floor(fraction * steps + 0.5)


def _twice(name: str, steps: int | None, fraction: float | None, *, off: str) -> Iterator[Problem]:
    if steps is not None and fraction is not None:
        rule = f"{fraction} and schedule.{name}_steps={steps} both set the length of the {name}"
        yield f"schedule.{name}_fraction", f"{rule}; set only one: to use this one, schedule.{name}_steps={off}"
