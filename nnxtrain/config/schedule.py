"""The learning rate of each update."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up, then a decay. The closed forms stand in `optim/schedules.py`."""

    name: str = key("cosine", "curve after the warm-up", choices=("constant", "cosine", "linear"))
    warmup_steps: int = key(0, "updates before the peak", low=0)
    decay_steps: int | None = key(None, "updates from the peak to the end; null = up to the last of `steps`", low=0)
    final_fraction: float = key(0.1, "last learning rate as a share of the peak", low=0, high=1)
