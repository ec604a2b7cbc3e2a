"""Which steps are traced."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Windows of traced steps, as torch's profiler schedules them."""

    enabled: bool = key(False, "trace the windows below", planned=True)
    skip_first: int = key(1, "steps before the first cycle", planned=True)
    wait: int = key(0, "idle steps at the start of a cycle", planned=True)
    warmup: int = key(1, "traced steps that are thrown away", planned=True)
    active: int = key(3, "traced steps that are kept", planned=True)
    repeat: int = key(1, "cycles; 0 = to the end of the run", planned=True)
