"""Sampling of text: at each evaluation, and by `python -m nnxtrain.generate`."""

from dataclasses import dataclass

from nnxtrain.config.key import key
from nnxtrain.config.reads import when

# people switch sampling off and on: what has no effect meanwhile is announced, not refused
WRITES = when("generate.tokens").only_noted()
DRAWS = (when("generate.tokens") & when("generate.temperature")).only_noted()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How tokens are sampled."""

    prompt: str = key("def ", "text to continue")
    tokens: int = key(200, "tokens to generate", span="[0, 1000000]")
    temperature: float = key(
        0.8, "logits are divided by this; 0 = always the most likely token", span="[0, 1e6]", read=WRITES
    )
    top_k: int | None = key(
        None,
        "sample from this many of the most likely tokens; null = all",
        span="[1, inf)",
        read=DRAWS,
    )
    seed: int = key(0, "seed of the sampling", span="[0, inf)", read=DRAWS)
