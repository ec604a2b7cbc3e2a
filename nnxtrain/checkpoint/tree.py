"""A state as flat trees of arrays, by path, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from nnxtrain.state import TrainStateNNX

TreePath = tuple[str, ...]
Tree = Mapping[TreePath, Any]

# item of a checkpoint → the part of a state that it contains
PARTS: dict[str, Callable[[TrainStateNNX], Any]] = {
    "model": lambda state: state.model,
    "optimizer": lambda state: state.optimizer,
    "guard": lambda state: nnx.Dict(guard=state.guard, step=state.step),
}


def flat(state: TrainStateNNX, name: str) -> dict[TreePath, Any]:
    """Returns the arrays of one item by path; they may be abstract."""
    pure = nnx.to_pure_dict(nnx.state(PARTS[name](state)))
    return {tuple(map(str, path)): leaf for path, leaf in flatten_dict(pure).items()}


def put(state: TrainStateNNX, name: str, arrays: Tree) -> None:
    """Replaces arrays of one item by those of `arrays` with the same path; the others are unchanged."""
    part = PARTS[name](state)
    pure = flatten_dict(nnx.to_pure_dict(nnx.state(part)))
    nnx.update(part, unflatten_dict({path: arrays.get(tuple(map(str, path)), leaf) for path, leaf in pure.items()}))


def nested(tree: Tree) -> dict[str, Any]:
    """Returns a flat tree as nested mappings."""
    return unflatten_dict(dict(tree))


def flattened(tree: Mapping[str, Any]) -> dict[TreePath, Any]:
    """Returns nested mappings as a flat tree."""
    return flatten_dict(dict(tree))


def all_finite(state: TrainStateNNX) -> jax.Array:
    """Returns whether every weight and moment is finite, a scalar."""
    leaves = jax.tree.leaves(nnx.state((state.model, state.optimizer)))
    return jax.numpy.stack([jax.numpy.isfinite(leaf).all() for leaf in leaves]).all()
