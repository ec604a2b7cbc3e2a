"""When and how to evaluate."""

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
    """Evaluation on every held-out set, always at the end too; each writes a sample of text."""

    every_steps: int = key(0, "evaluate every so many steps; 0 = at the end only", span="[0, inf)")
    global_size: int = key(
        0, "sequences per forward pass, over all devices; 0 = those of a microbatch", span="[0, 16777216]"
    )
    max_batches: int | None = key(
        None, "batches of each held-out set; null = all", span="[1, inf)", read=HELD_OUT.only_noted()
    )
