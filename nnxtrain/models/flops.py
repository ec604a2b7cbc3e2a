"""Parameters and work of a decoder by formula."""

from nnxtrain.config.model import LOCAL, ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Returns the weights that each token is multiplied with: all matrices and the head, tied or not.

    The embedding is looked up, not multiplied, and norms are not matrices.
    """
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 3 * config.embed * config.mlp
    return config.layers * (attention + mlp) + config.embed * config.padded_vocab


def flops_per_token(config: ModelConfig, sequence: int) -> float:
    """Returns the FLOPs of one training step per token, forward and backward, without recomputation.

    `6 * weights + 12 * seen * heads * head_dim`: two products of matrices forward and four backward; `seen` are the
    tokens that a token sees, on average over the sequence and summed over the layers: half of the sequence, or less
    where a window ends before.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, with the causal half counted once.
    """
    windows = [min(config.window or sequence, sequence) if kind == LOCAL else sequence for kind in config.kinds]
    seen = sum(window - window**2 / (2 * sequence) for window in windows)
    return 6.0 * (matmul_parameters(config) + 2 * seen * config.heads * config.head_dim)
