"""Diagnosis, and what to do about non-finite values, loss spikes and hangs."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Diagnosis, and what to do about non-finite values, loss spikes and hangs."""

    traceback: bool = key(False, "print the Python traceback of an error")
    platform: str = key("auto", "jax backend", choices=("auto", "cpu", "gpu", "tpu"))
    show_sharding: bool = key(
        False, "before the first step, print how each parameter is sharded and its bytes per device"
    )
    compilation_cache: str | None = key(
        "auto", "folder of jax's persistent compilation cache; auto = the user's cache directory, null = off"
    )
    on_nonfinite: str = key(
        "abort",
        "if loss or gradients are not finite: stop, skip the update, or roll back to a checkpoint and skip the data",
        choices=("abort", "rollback", "skip"),
    )
    nonfinite_limit: int = key(
        10,
        "updates skipped in a row, or rollbacks, after which the run stops",
        span="[1, inf)",
        read=when("debug.on_nonfinite", "rollback", "skip") | when("debug.spike_deviations"),
    )
    spike_deviations: float | None = key(
        None,
        "skip updates whose loss or gradient norm is this many standard deviations above its mean; null = off",
        span="[1, 1000000]",
    )
    spike_warmup_steps: int = key(
        50, "updates before spikes are looked for", span="[2, inf)", read=when("debug.spike_deviations")
    )
    hang_timeout_s: float | None = key(
        None,
        "seconds without a step after which the stacks of all threads are written; null = off",
        span="[0.1, 1000000]",
    )
    hang_abort: bool = key(False, "end the process after hang_timeout_s", read=when("debug.hang_timeout_s"))
