"""Parameters viewed as matrices, from their logical axes: never from their number of dimensions.

A scanned stack has the parameters of many layers in one array, and a projection to heads is a matrix with two output
axes. An update rule that depends on shapes must see neither, or scanned and unrolled models are updated differently.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.axes import EMBED, STACKED, axes_of

Dims = tuple[int, ...]  # indices of dimensions


def matrix_dims(axes: tuple[str, ...]) -> tuple[Dims, Dims] | None:
    """Returns the input and the output dimensions of a matrix; None for norm scales and biases.

    A matrix maps the embedding axis to others, or others to it; tables of token vectors included.
    """
    own = tuple(dim for dim, axis in enumerate(axes) if axis not in STACKED)
    if len(own) > 1 and axes[own[0]] == EMBED:
        return own[:1], own[1:]
    if len(own) > 1 and axes[own[-1]] == EMBED:
        return own[:-1], own[-1:]
    return None


@dataclass(frozen=True)
class _View:
    """The shape of a parameter as an update rule sees it.

    Attributes:
        copies: sizes of the stacked axes.
        shape: of one layer's parameter, `[in out]` if it is a matrix.
    """

    copies: tuple[int, ...]
    shape: tuple[int, ...]


def _view_of(parameter: nnx.Variable) -> _View:
    axes, sizes = axes_of(parameter), parameter.shape
    copies = tuple(size for axis, size in zip(axes, sizes, strict=True) if axis in STACKED)
    dims = matrix_dims(axes)
    if dims is None:
        return _View(copies, sizes[len(copies) :])
    rows, columns = (math.prod(sizes[dim] for dim in side) for side in dims)
    return _View(copies, (rows, columns))


def per_matrix(rule: optax.GradientTransformation, params: nnx.State) -> optax.GradientTransformation:
    """Returns `rule` for scanned and unrolled parameters: it sees one layer at a time, matrices `[in out]`, in float32.

    Args:
        rule: acts on each parameter separately.
        params: variables with logical axis names; stacked axes come first.
    """
    views = nnx.map_state(lambda path, parameter: _view_of(parameter), params)

    def as_matrices(tree: Any) -> Any:
        def one(view: _View, leaf: jax.Array) -> jax.Array:
            return leaf.astype(jnp.float32).reshape(view.copies + view.shape)

        return jax.tree.map(one, views, nnx.as_pure(tree))

    init, update = rule.init, rule.update
    one_layer = jax.tree.map(lambda view: jax.ShapeDtypeStruct(view.shape, jnp.float32), views)
    state = jax.eval_shape(init, one_layer)
    levels = {(depth, size) for view in jax.tree.leaves(views) for depth, size in enumerate(view.copies[::-1])}
    for depth, size in sorted(levels):  # vmaps from the last stacked axis outward

        def axis(leaf: Any, view: _View, depth=depth, size=size) -> int | None:
            return 0 if view.copies[::-1][depth : depth + 1] == (size,) else None

        of_params = jax.tree.map(axis, one_layer, views)
        of_state = optax.tree.map_params(rule, axis, state, views, transform_non_params=lambda leaf: None)
        init = jax.vmap(init, in_axes=(of_params,), out_axes=of_state)
        update = jax.vmap(update, in_axes=(of_params, of_state, of_params), out_axes=(of_params, of_state))

    def update_all(updates: Any, state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        moved, state = update(as_matrices(updates), state, as_matrices(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), moved, updates), state

    return optax.GradientTransformation(lambda params: init(as_matrices(params)), update_all)
