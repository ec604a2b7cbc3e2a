"""Text from a model: the samples at each evaluation, and `python -m nnxtrain.generate`."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when

WRITES = when("generate.tokens")
DRAWS = WRITES & when("generate.temperature")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How text is drawn from the logits."""

    prompt: str = key("def ", "text that the model continues")
    tokens: int = key(200, "tokens written after the prompt", span="[0, 1000000]")
    temperature: float = key(
        0.8, "logits are divided by this; 0 = always the likeliest token", span="[0, 1e6]", read=WRITES
    )
    top_k: int | None = key(
        None,
        "draw from this many of the likeliest tokens; null = all",
        span="[1, inf)",
        read=DRAWS,
    )
    seed: int = key(0, "seed of the draws", span="[0, inf)", read=DRAWS)
