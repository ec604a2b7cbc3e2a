"""The learning rate of each update."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, then a curve. The closed forms stand in `optim/schedules.py`."""

    name: str = key(
        "cosine", "curve after the warm-up", choices=("constant", "cosine", "inverse_sqrt", "linear", "wsd")
    )
    warmup_steps: int = key(0, "updates before the peak", span="[0, inf)")
    warmup_fraction: float | None = key(
        None, "instead of warmup_steps: share of the run's steps, rounded to a whole number", span="[0, 1]"
    )
    decay_steps: int | None = key(
        None,
        "updates of the decay: from the peak on, wsd to the end; null = all that are left, wsd a tenth of steps",
        span="[0, inf)",
    )
    decay_fraction: float | None = key(
        None, "instead of decay_steps: share of the run's steps, rounded to a whole number", span="[0, 1]"
    )
    final_fraction: float = key(0.1, "last learning rate as a share of the peak", span="[0, 1]")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields `(key, what is wrong and what would be right)`."""
        for name, steps, fraction, off in (
            ("warmup", self.warmup_steps or None, self.warmup_fraction, 0),
            ("decay", self.decay_steps, self.decay_fraction, "null"),
        ):
            if steps is not None and fraction is not None:
                rule = f"{fraction} and schedule.{name}_steps={steps} say the same thing twice"
                yield f"schedule.{name}_fraction", f"{rule}; give one, with schedule.{name}_steps={off} if it is this"
