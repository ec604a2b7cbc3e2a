"""Switches for people who look for a fault."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Diagnosis; none of these changes what is computed."""

    traceback: bool = key(False, "show the Python traceback of an error")
    platform: str = key("auto", "backend of jax", choices=("auto", "cpu", "gpu", "tpu"))
    compilation_cache: str | None = key(
        "auto", "folder of compiled programs; auto = the user's cache directory, null = none"
    )
    on_nonfinite: str = key(
        "abort", "a step whose loss or gradients are not finite: leave the weights and stop", choices=("abort",)
    )
