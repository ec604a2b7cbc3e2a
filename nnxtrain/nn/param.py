"""Parameters that know what their axes mean."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import nnx

TRUNCATED_STD = 0.87962566103423978  # of a standard normal that is cut at -2 and 2


class Precision(NamedTuple):
    """Types of a layer: what it computes in, and what its weights are kept in."""

    compute: jax.typing.DTypeLike
    weights: jax.typing.DTypeLike


def named(init: jax.nn.initializers.Initializer, *axes: str) -> jax.nn.initializers.Initializer:
    """Returns `init` so that the parameter it makes carries logical axis names, one a dimension."""
    return nnx.with_metadata(init, axes=axes)


def truncated_normal(deviation: float) -> jax.nn.initializers.Initializer:
    """Returns a normal initialiser that is cut at two deviations of the normal and then has the given deviation."""
    return nnx.initializers.truncated_normal(deviation / TRUNCATED_STD)


def projection(
    equation: str, sizes: Mapping[str, int], *, precision: Precision, rngs: nnx.Rngs, scale: float = 1.0
) -> nnx.Einsum:
    """Returns a linear layer without bias.

    Args:
        equation: of activations and kernel, such as `"bsd,dhc->bshc"`.
        sizes: logical axis name → size, in the order of the kernel's letters.
        precision: types of computation and weights.
        rngs: where the weights are drawn from: a normal, cut at two deviations.
        scale: times one over the root of the number of inputs is the standard deviation of the weights.
    """
    operands, result = equation.split("->")
    letters = operands.split(",")[1]
    n_in = math.prod(size for letter, size in zip(letters, sizes.values(), strict=True) if letter not in result)
    init = named(truncated_normal(scale / math.sqrt(n_in)), *sizes)
    shape = tuple(sizes.values())
    return nnx.Einsum(
        equation, shape, dtype=precision.compute, param_dtype=precision.weights, kernel_init=init, rngs=rngs
    )
