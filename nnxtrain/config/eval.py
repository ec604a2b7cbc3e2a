"""When and how the held-out sets are read."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when

HELD_OUT = (
    when("data.source", "synthetic")
    | when("data.source", "stdlib") & when("data.validation_fraction")
    | when("data.source", "text") & when("data.validation_path")
)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of every named set; always at the end, and a sample of text with it."""

    every_steps: int = key(0, "steps between two evaluations; 0 = at the end only", span="[0, inf)")
    global_size: int = key(
        0, "sequences per forward pass, all devices; 0 = those of a microbatch", span="[0, 16777216]"
    )
    max_batches: int | None = key(None, "batches read of each set; null = all", span="[1, inf)", read=HELD_OUT.mildly())
