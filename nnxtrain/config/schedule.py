"""The learning rate of each update."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, then a decay. The closed forms stand in `optim/schedules.py`."""

    name: str = key("cosine", "curve after the warm-up", choices=("constant", "cosine", "linear"))
    warmup_steps: int = key(0, "updates before the peak", span="[0, inf)")
    decay_steps: int | None = key(None, "updates from the peak to the end; null = to the last one", span="[0, inf)")
    final_fraction: float = key(0.1, "last learning rate as a share of the peak", span="[0, 1]")
