"""Parameters with logical axis names, and their initialisers."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
from flax import nnx

TRUNCATED_STD = 0.87962566103423978  # standard deviation of a standard normal truncated at -2 and 2


class Precision(NamedTuple):
    """Dtypes of a layer: of its computation and of its stored weights."""

    compute: jax.typing.DTypeLike
    weights: jax.typing.DTypeLike


class LayerInit(NamedTuple):
    """What every layer is initialised with.

    Attributes:
        precision: dtypes of computation and weights.
        rngs: random keys of the weights.
        out_scale: factor of the initial weights of projections that write to the residual stream.
    """

    precision: Precision
    rngs: nnx.Rngs
    out_scale: float


def named(init: jax.nn.initializers.Initializer, *axes: str) -> jax.nn.initializers.Initializer:
    """Returns `init` with logical axis names for the parameter that it makes, one per dimension."""
    return nnx.with_metadata(init, axes=axes)


def truncated_normal(std: float) -> jax.nn.initializers.Initializer:
    """Returns a normal initialiser truncated at two standard deviations, rescaled to the standard deviation `std`."""
    return nnx.initializers.truncated_normal(std / TRUNCATED_STD)


def projection(equation: str, sizes: Mapping[str, int], init: LayerInit, *, scale: float = 1.0) -> nnx.Einsum:
    """Returns a linear layer without bias.

    Args:
        equation: einsum of activations and kernel, such as `"bsd,dhc->bshc"`.
        sizes: logical axis name → size, in the order of the kernel's letters.
        init: dtypes and random keys; weights are drawn from a normal truncated at two standard deviations.
        scale: the standard deviation of the weights is `scale / sqrt(inputs)`.
    """
    operands, output = equation.split("->")
    letters = operands.split(",")[1]
    n_in = math.prod(size for letter, size in zip(letters, sizes.values(), strict=True) if letter not in output)
    draw = named(truncated_normal(scale / math.sqrt(n_in)), *sizes)
    compute, weights = init.precision
    shape = tuple(sizes.values())
    return nnx.Einsum(equation, shape, dtype=compute, param_dtype=weights, kernel_init=draw, rngs=init.rngs)
