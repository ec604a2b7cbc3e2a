"""The training loss."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Cross-entropy and its additional terms."""

    z_loss: float = key(
        0.0, "weight of the z-loss, the squared log-normaliser, which keeps logits small", span="[0, 1000]"
    )
    chunks: int = key(
        0,
        "chunks of a sequence whose logits are computed one after another, to save memory; "
        "0 = 1 for a vocabulary below 16384, else up to 8",
        span="[0, inf)",
    )
