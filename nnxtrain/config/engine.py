"""What runs one step."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine that the loop drives."""

    name: str = key(
        "single",
        "the step as one program, or as one for a microbatch and one for the update",
        choices=("single", "split"),
    )
    max_inflight: int = key(
        2,
        "updates of the split engine that may be under way at a time",
        span="[1, inf)",
        read=when("engine.name", "split"),
    )
