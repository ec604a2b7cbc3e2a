"""Pipeline parallelism."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism."""

    mode: str = key("spmd", "one program for all stages (SPMD), or one for each (MPMD)", planned=True)
    stages: int = key(1, "pipeline stages", planned=True)
    microbatches: int = key(1, "slices of a microbatch that are in the pipeline at a time", planned=True)
    repeats: int = key(1, "how often a slice passes through each stage (circular pipeline)", planned=True)
    schedule: str = key("gpipe", "order of forward and backward passes", planned=True)
