"""Parameters as the matrices they are, told by their logical axes: never by their number of dimensions.

A parameter of a scanned stack is many parameters in one array, and a projection to heads is a matrix whose output has
two axes. A rule that looks at shapes must see neither, or scanned and unrolled models are updated differently.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxtrain.axes import EMBED, STACKED, axes_of

Places = tuple[int, ...]  # of dimensions


def matrix_dims(axes: tuple[str, ...]) -> tuple[Places, Places] | None:
    """Returns where the inputs and the outputs of a matrix lie, or None: norm scales and biases are no matrices.

    A matrix maps the embedding axis to others or others to it; the tables of tokens do too.
    """
    own = tuple(place for place, axis in enumerate(axes) if axis not in STACKED)
    if len(own) > 1 and axes[own[0]] == EMBED:
        return own[:1], own[1:]
    if len(own) > 1 and axes[own[-1]] == EMBED:
        return own[:-1], own[-1:]
    return None


@dataclass(frozen=True)
class _View:
    """A parameter as a rule sees it.

    Attributes:
        copies: sizes of the axes that count copies of the parameter.
        shape: of one copy, `[in out]` if it is a matrix.
    """

    copies: tuple[int, ...]
    shape: tuple[int, ...]


def _view_of(parameter: nnx.Variable) -> _View:
    axes, sizes = axes_of(parameter), parameter.shape
    copies = tuple(size for axis, size in zip(axes, sizes, strict=True) if axis in STACKED)
    sides = matrix_dims(axes)
    if sides is None:
        return _View(copies, sizes[len(copies) :])
    rows, columns = (math.prod(sizes[place] for place in side) for side in sides)
    return _View(copies, (rows, columns))


def per_matrix(rule: optax.GradientTransformation, params: nnx.State) -> optax.GradientTransformation:
    """Returns `rule` for parameters of any layout: it sees one layer at a time, a matrix as `[in out]`, all in float32.

    Args:
        rule: acts on each parameter apart.
        params: variables that know their logical axes; stacked axes come first.
    """
    views = nnx.map_state(lambda path, parameter: _view_of(parameter), params)

    def seen(tree: Any) -> Any:
        def one(view: _View, leaf: jax.Array) -> jax.Array:
            return leaf.astype(jnp.float32).reshape(view.copies + view.shape)

        return jax.tree.map(one, views, nnx.as_pure(tree))

    init, update = rule.init, rule.update
    alone = jax.tree.map(lambda view: jax.ShapeDtypeStruct(view.shape, jnp.float32), views)
    state = jax.eval_shape(init, alone)
    levels = {(depth, size) for view in jax.tree.leaves(views) for depth, size in enumerate(view.copies[::-1])}
    for depth, size in sorted(levels):  # the last of the stacked axes is mapped over first, and so on outward

        def axis(leaf: Any, view: _View, depth=depth, size=size) -> int | None:
            return 0 if view.copies[::-1][depth : depth + 1] == (size,) else None

        of_params = jax.tree.map(axis, alone, views)
        of_state = optax.tree.map_params(rule, axis, state, views, transform_non_params=lambda leaf: None)
        init = jax.vmap(init, in_axes=(of_params,), out_axes=of_state)
        update = jax.vmap(update, in_axes=(of_params, of_state, of_params), out_axes=(of_params, of_state))

    def update_all(updates: Any, state: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
        moved, state = update(seen(updates), state, seen(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), moved, updates), state

    return optax.GradientTransformation(lambda params: init(seen(params)), update_all)
