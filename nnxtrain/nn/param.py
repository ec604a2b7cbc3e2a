"""Parameters that know what their axes mean."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import nnx

TRUNCATED_STD = 0.87962566103423978  # of a standard normal that is truncated at -2 and 2


class Precision(NamedTuple):
    """Types of a layer: what it computes in, and what its weights are kept in."""

    compute: jax.typing.DTypeLike
    weights: jax.typing.DTypeLike


class LayerInit(NamedTuple):
    """What every layer is initialised with.

    Attributes:
        precision: types of computation and weights.
        rngs: where the weights are drawn from.
        out_scale: shrinks the initial projections that write to the residual stream.
    """

    precision: Precision
    rngs: nnx.Rngs
    out_scale: float


def named(init: jax.nn.initializers.Initializer, *axes: str) -> jax.nn.initializers.Initializer:
    """Returns `init` so that the parameter it makes carries logical axis names, one a dimension."""
    return nnx.with_metadata(init, axes=axes)


def truncated_normal(deviation: float) -> jax.nn.initializers.Initializer:
    """Returns a normal initialiser that is cut at two deviations of the normal and then has the given deviation."""
    return nnx.initializers.truncated_normal(deviation / TRUNCATED_STD)


def projection(equation: str, sizes: Mapping[str, int], init: LayerInit, *, scale: float = 1.0) -> nnx.Einsum:
    """Returns a linear layer without bias.

    Args:
        equation: of activations and kernel, such as `"bsd,dhc->bshc"`.
        sizes: logical axis name → size, in the order of the kernel's letters.
        init: types of computation and weights; weights are drawn from a normal, truncated at two deviations.
        scale: times one over the root of the number of inputs is the standard deviation of the weights.
    """
    operands, result = equation.split("->")
    letters = operands.split(",")[1]
    n_in = math.prod(size for letter, size in zip(letters, sizes.values(), strict=True) if letter not in result)
    draw = named(truncated_normal(scale / math.sqrt(n_in)), *sizes)
    compute, weights = init.precision
    shape = tuple(sizes.values())
    return nnx.Einsum(equation, shape, dtype=compute, param_dtype=weights, kernel_init=draw, rngs=init.rngs)
