"""What the backward pass keeps."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class RematConfig:
    """Rematerialisation of each block."""

    policy: str = key(
        "none",
        "kept for the backward pass: everything (none), block inputs alone (full), products of matrices (dots)",
        choices=("dots", "full", "none"),
    )
