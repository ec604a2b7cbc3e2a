"""How gradients become updates."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optax chain: clipping, the rule, decoupled weight decay."""

    name: str = key("adamw", "update rule", choices=("adamw", "sgd"))
    learning_rate: float = key(3e-4, "peak learning rate", span="[0, 1e38]")
    weight_decay: float = key(
        0.1, "decoupled decay of matrices and embeddings; norms and biases are never decayed", span="[0, inf)"
    )
    b1: float = key(0.9, "adamw: memory of the first moment", span="[0, 1)")
    b2: float = key(0.95, "adamw: memory of the second moment", span="[0, 1)")
    eps: float = key(1e-8, "adamw: added to the root of the second moment", span="[0, inf)")
    momentum: float = key(0.0, "sgd: memory of the velocity", span="[0, 1)")
    clip_norm: float | None = key(1.0, "gradients are scaled down to this norm; 0 or null = off", span="[0, inf)")
