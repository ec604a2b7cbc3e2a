"""How a step is executed."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine that the loop drives."""

    name: str = key(
        "single",
        "single = one program for the whole step; split = one for a microbatch and one for the update",
        choices=("single", "split"),
    )
    max_inflight: int = key(
        2,
        "updates of the split engine that may be dispatched and not finished",
        span="[1, inf)",
        read=when("engine.name", "split"),
    )
