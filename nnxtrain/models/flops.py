"""Parameters and work of a decoder by formula."""

from nnxtrain.config.model import ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Returns the weights that each token is multiplied with: all matrices and the head, tied or not.

    The embedding is looked up, not multiplied, and norms are not matrices.
    """
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 3 * config.embed * config.mlp
    return config.layers * (attention + mlp) + config.embed * config.padded_vocab


def flops_per_token(config: ModelConfig, sequence: int) -> float:
    """Returns the FLOPs of one training step per token, forward and backward, without recomputation.

    `6 * weights + 6 * layers * sequence * heads * head_dim`: two products of matrices forward and four backward, scores
    and their sums over the half of the sequence that is in the past, on average.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, with the causal half counted once.
    """
    attention = config.layers * sequence * config.heads * config.head_dim
    return 6.0 * (matmul_parameters(config) + attention)
