"""What runs one step."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine that the loop drives."""

    name: str = key("single", "the step as one compiled program", choices=("single",))
