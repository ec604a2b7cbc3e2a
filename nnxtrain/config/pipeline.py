"""Layers spread over devices, one stage after another."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism."""

    mode: str = key("spmd", "one program for all stages, or one each", planned=True)
    stages: int = key(1, "parts the stack is cut into", planned=True)
    microbatches: int = key(1, "slices of a microbatch in flight", planned=True)
    repeats: int = key(1, "visits of a slice to each stage", planned=True)
    schedule: str = key("gpipe", "order of forward and backward passes", planned=True)
