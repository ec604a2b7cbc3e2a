"""What is minimised."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy and what is added to it."""

    z_loss: float = key(0.0, "weight of the squared log-normaliser, which keeps logits small", span="[0, 1000]")
    chunks: int = key(
        0,
        "pieces a sequence is cut into so that logits are never held whole; "
        "0 = 1 for a vocabulary below 16384, else 8 or fewer",
        span="[0, inf)",
    )
