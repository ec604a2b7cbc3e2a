"""FLOPs of a decoder: matrices counted from the parameters, attention from a formula."""

import math

from flax import nnx

from nnxtrain.axes import VOCAB, axes_of
from nnxtrain.config.model import LOCAL, ModelConfig
from nnxtrain.optim.matrices import matrix_dims


def matmul_parameters(params: nnx.State) -> int:
    """Returns the number of weights that each token is multiplied by: all matrices and the head, tied or not.

    The embedding is a lookup, so only one table of token vectors counts. Norms and biases do not.

    Args:
        params: all parameters of the model; may be abstract.
    """
    leaves = [(axes_of(leaf), math.prod(leaf.shape)) for _, leaf in nnx.to_flat_state(params)]
    head = max(size for axes, size in leaves if VOCAB in axes)
    return head + sum(size for axes, size in leaves if matrix_dims(axes) and VOCAB not in axes)


def flops_per_token(config: ModelConfig, sequence: int, *, weights: int) -> float:
    """Returns the FLOPs of one training step per token, forward and backward, without recomputation.

    `6 * weights + 12 * seen * heads * head_dim`: 2 FLOPs per weight forward and 4 backward; `seen` is the number of
    keys per query, averaged over the sequence and summed over layers: half of the sequence, less with a window.

    Args:
        config: sizes of heads, and the kinds and windows of layers.
        sequence: tokens per row.
        weights: see `matmul_parameters`.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, but counting only the causal half of attention.
    """
    windows = [min(config.window or sequence, sequence) if kind == LOCAL else sequence for kind in config.kinds]
    seen = sum(window - window**2 / (2 * sequence) for window in windows)
    return 6.0 * (weights + 2 * seen * config.heads * config.head_dim)
