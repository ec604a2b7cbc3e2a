"""Work of a decoder: its matrices are counted as they are, attention by formula."""

import math

from flax import nnx

from nnxtrain.axes import VOCAB, axes_of
from nnxtrain.config.model import LOCAL, ModelConfig
from nnxtrain.optim.matrices import matrix_dims


def matmul_parameters(params: nnx.State) -> int:
    """Returns the weights that each token is multiplied with: all matrices and the head, tied or not.

    The embedding is looked up, not multiplied, so that of the tables of tokens one counts. Norms and biases are no
    matrices.

    Args:
        params: of the whole model, which may be abstract.
    """
    leaves = [(axes_of(leaf), math.prod(leaf.shape)) for _, leaf in nnx.to_flat_state(params)]
    head = max(size for axes, size in leaves if VOCAB in axes)
    return head + sum(size for axes, size in leaves if matrix_dims(axes) and VOCAB not in axes)


def flops_per_token(config: ModelConfig, sequence: int, *, weights: int) -> float:
    """Returns the FLOPs of one training step per token, forward and backward, without recomputation.

    `6 * weights + 12 * seen * heads * head_dim`: two products of matrices forward and four backward; `seen` are the
    tokens that a token sees, on average over the sequence and summed over the layers: half of the sequence, or less
    where a window ends before.

    Args:
        config: sizes of heads, and what layers see.
        sequence: tokens of a row.
        weights: see `matmul_parameters`.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, with the causal half counted once.
    """
    windows = [min(config.window or sequence, sequence) if kind == LOCAL else sequence for kind in config.kinds]
    seen = sum(window - window**2 / (2 * sequence) for window in windows)
    return 6.0 * (weights + 2 * seen * config.heads * config.head_dim)
