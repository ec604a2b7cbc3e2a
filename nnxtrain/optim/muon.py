"""Muon for parameters of any layout: layers of a scanned stack are batched, heads and their width are one side."""

import math

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from nnxtrain.axes import VOCAB, axes_of
from nnxtrain.config.optimizer import OptimizerConfig
from nnxtrain.optim.matrices import matrix_dims

RMS = 0.2  # root mean square of an update, about that of an adamw update: one learning rate fits both


def stack_matrix(parameter: nnx.Variable) -> MuonDimensionNumbers | None:
    """Returns where inputs and outputs of a matrix of the stack lie; None for tables of tokens, norms and biases."""
    axes = axes_of(parameter)
    sides = None if VOCAB in axes else matrix_dims(axes)
    return None if sides is None else MuonDimensionNumbers(*sides)


def scale_by_muon(config: OptimizerConfig, params: nnx.State) -> optax.GradientTransformation:
    """Returns what turns gradients of matrices into orthogonal directions, times `RMS * sqrt(max(inputs, outputs))`.

    Args:
        config: memory and type of the velocity.
        params: all parameters; those that are no matrices of the stack are masked in the trees that it will see.

    Source: Jordan 2024, github.com/KellerJordan/Muon; Liu et al. 2025, arXiv:2502.16982 (size of an update).
    """
    matrices = nnx.map_state(lambda path, parameter: stack_matrix(parameter) or optax.MaskedNode(), params)

    def resize(update: jax.Array, places: MuonDimensionNumbers) -> jax.Array:
        longer = max(math.prod(update.shape[place] for place in side) for side in places)
        return RMS * math.sqrt(longer) * update  # entries of an orthogonal matrix have the mean square 1 / longer

    turn = optax.contrib.scale_by_muon(
        beta=config.momentum, mu_dtype=config.mu_dtype, weight_dimension_numbers=lambda tree: matrices
    )
    return optax.chain(turn, optax.stateless(lambda updates, params: jax.tree.map(resize, updates, matrices)))
