"""Muon for scanned and unrolled parameters: layers are batched, heads and head_dim merged into one dimension."""

import math

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from nnxtrain.axes import VOCAB, axes_of
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.optim.matrices import matrix_dims

RMS = 0.2  # root mean square of an update, about that of adamw, so that both use one learning rate


def stack_matrix(parameter: nnx.Variable) -> MuonDimensionNumbers | None:
    """Returns input and output dimensions of a matrix in the stack; None for token tables, norms and biases."""
    axes = axes_of(parameter)
    dims = None if VOCAB in axes else matrix_dims(axes)
    return None if dims is None else MuonDimensionNumbers(*dims)


def scale_by_muon(config: OptimizerConfig, params: nnx.State) -> optax.GradientTransformation:
    """Returns the transformation to orthogonalised momentum, scaled by `RMS * sqrt(max(inputs, outputs))`.

    Args:
        config: decay rate and dtype of the momentum.
        params: all parameters; those that are not matrices of the stack are masked in its inputs.

    Source: Jordan 2024, github.com/KellerJordan/Muon; Liu et al. 2025, arXiv:2502.16982 (size of an update).
    """
    matrices = nnx.map_state(lambda path, parameter: stack_matrix(parameter) or optax.MaskedNode(), params)

    def resize(update: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
        longer = max(math.prod(update.shape[dim] for dim in side) for side in dims)
        return RMS * math.sqrt(longer) * update  # the mean square of an orthogonal matrix is 1 / longer

    orthogonalise = optax.contrib.scale_by_muon(
        beta=config.momentum, mu_dtype=config.mu_dtype, weight_dimension_numbers=lambda tree: matrices
    )
    return optax.chain(orthogonalise, optax.stateless(lambda updates, params: jax.tree.map(resize, updates, matrices)))
