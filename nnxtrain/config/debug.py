"""Switches for people who look for a fault."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Diagnosis, and what becomes of steps that go wrong."""

    traceback: bool = key(False, "show the Python traceback of an error")
    platform: str = key("auto", "backend of jax", choices=("auto", "cpu", "gpu", "tpu"))
    show_sharding: bool = key(False, "list what each device holds of each parameter before the first step")
    compilation_cache: str | None = key(
        "auto", "folder of compiled programs; auto = the user's cache directory, null = none"
    )
    on_nonfinite: str = key(
        "abort",
        "loss or gradients not finite: stop the run, leave the update out, or go back and leave the rows out",
        choices=("abort", "rollback", "skip"),
    )
    nonfinite_limit: int = key(
        10,
        "updates left out in a row, or rollbacks of a run, before it stops",
        span="[1, inf)",
        read=when("debug.on_nonfinite", "rollback", "skip") | when("debug.spike_deviations"),
    )
    spike_deviations: float | None = key(
        None,
        "leave out updates whose loss or norm is this many deviations above the mean; null = off",
        span="[1, 1000000]",
    )
    spike_warmup_steps: int = key(
        50, "accepted updates before a spike can be told", span="[2, inf)", read=when("debug.spike_deviations")
    )
    hang_timeout_s: float | None = key(
        None,
        "seconds without a step before the stacks of all threads are written; null = off",
        span="[0.1, 1000000]",
    )
    hang_abort: bool = key(False, "end the process when it hangs", read=when("debug.hang_timeout_s"))
