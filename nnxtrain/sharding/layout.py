"""Where weights, optimizer state and activations lie on a mesh."""

import functools
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from nnxtrain.axes import BATCH, EMBED, SEQUENCE, VOCAB, axes_of
from nnxtrain.sharding.rules import Table, names_of, spec_of, tables


class MeshLayout:
    """Where arrays lie on one mesh, by the logical names of their dimensions."""

    def __init__(self, mesh: Mesh | AbstractMesh, rules: Iterable[str]):
        """Takes the table with `mesh.rules` put into it."""
        self.mesh = mesh
        self.table, self.optimizer_table = tables(rules)
        self._shared = {*self.table[BATCH], *self.table[SEQUENCE]}  # whoever computes needs weights whole along these

    def axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that cut a logical axis."""
        return tuple(name for name in self.table[logical] if self.mesh.shape[name] > 1)

    def activations(self, x: jax.Array, *axes: str) -> jax.Array:
        """Returns `x`, lying as the logical names of its dimensions ask for."""
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, self._here(x.shape, axes))

    def weights(self, module: Any) -> Any:
        """Returns a module as its computation needs it: gathered along what cuts the batch; gradients go back cut."""
        if self.mesh.size == 1:
            return module
        graph, state = nnx.split(module)
        return nnx.merge(
            graph, jax.tree.map(self._gathered, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        )

    def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the vectors of tokens; the table stays where it lies, and vectors travel in its place.

        Each device looks up what it has of the vectors of all who share the table with it. For fewer tokens on a device
        than ids in the vocabulary, that is less to send and to hold than the table and its gradient.

        Args:
            table: `[v d]`.
            ids: `[b s]`, each in the table.
        Returns: `[b s d]`, cut along `d` as the table is, and along `b` and `s` by what does not cut the table.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        here = functools.partial(spec_of, table=self.table, mesh=self.mesh.shape)
        stored = here(table.shape, (VOCAB, EMBED), without=manual)
        cutting, columns = (names_of(entry) for entry in (*stored, None, None)[:2])
        rows = here(ids.shape, (BATCH, SEQUENCE), without={*manual, *cutting, *columns})

        if not (sharing := {name for entry in (*stored, *rows) for name in names_of(entry)}):
            return jnp.take(table, ids, axis=0)

        def local(table: jax.Array, ids: jax.Array) -> jax.Array:
            if not cutting:
                return jnp.take(table, ids, axis=0)
            own = ids - jax.lax.axis_index(cutting) * len(table)
            is_here = (own >= 0) & (own < len(table))
            vectors = jnp.take(table, jnp.where(is_here, own, 0), axis=0)
            return jax.lax.psum(jnp.where(is_here[..., None], vectors, 0), cutting)

        return jax.shard_map(
            local,
            mesh=mesh if manual else self.mesh,
            axis_names=sharing,
            in_specs=(stored, rows),
            out_specs=PartitionSpec(*(*rows, None, None)[:2], columns or None),
            check_vma=False,
        )(table, ids)

    def pick(self, scores: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the score `[b s]` of each id; where the vocabulary `[b s v]` is cut, each device looks at its own."""
        if not self.axes(VOCAB):
            return jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]
        is_asked = jnp.arange(scores.shape[-1]) == ids[..., None]
        return jnp.sum(jnp.where(is_asked, scores, 0), axis=-1)

    def state(self, state: nnx.State) -> nnx.State:
        """Returns the shapes and types of a whole state with the sharding of each leaf.

        What lies below a path that ends like that of a parameter, and has its shape, is cut as the table for optimizer
        state says; what else is no parameter is whole on each device.
        """
        flat = nnx.to_flat_state(state)
        parameters = {path[1:]: leaf for path, leaf in flat if isinstance(leaf, nnx.Param)}

        def sharding(path: tuple[Any, ...], leaf: nnx.Variable) -> NamedSharding:
            if isinstance(leaf, nnx.Param):
                return self._stored(leaf, self.table)
            ends = (parameters.get(path[start:]) for start in range(1, len(path)))
            twin = next((end for end in ends if end is not None and end.shape == leaf.shape), None)
            return (
                NamedSharding(self.mesh, PartitionSpec()) if twin is None else self._stored(twin, self.optimizer_table)
            )

        def placed(path: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
            return leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(path, leaf)))

        return nnx.from_flat_state([(path, placed(path, leaf)) for path, leaf in flat])

    def sums(self, shapes: Any, *, copies: tuple[str, ...]) -> Any:
        """Returns abstract sums of a microbatch, leaves `[c ...]`, with the sharding of each leaf.

        Gradients lie as their parameters do; `copies` are the mesh axes that the first dimension is spread over.
        """

        def placed(leaf: Any) -> Any:
            array = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            own = self._stored(leaf, self.table, skip=1).spec if isinstance(leaf, nnx.Param) else ()
            sharding = NamedSharding(self.mesh, PartitionSpec(copies or None, *own))
            abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            return leaf.replace(abstract) if isinstance(leaf, nnx.Variable) else abstract

        return jax.tree.map(placed, shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def cuts(self, weights: Any, names: Collection[str]) -> Any:
        """Returns which of some mesh axes cut the arrays of a tree of variables: a `PartitionSpec` for each variable.

        An array that other axes cut along the same dimension, and before these, is brought into that order.
        """

        def cut(variable: nnx.Variable) -> PartitionSpec:
            stored = self._stored(variable, self.table).spec if isinstance(variable, nnx.Param) else ()
            return PartitionSpec(
                *(tuple(name for name in names_of(entry) if name in names) or None for entry in stored)
            )

        return jax.tree.map(cut, weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _stored(self, parameter: nnx.Variable, table: Table, *, skip: int = 0) -> NamedSharding:
        """Returns where a parameter lies, or a stack of such along its first `skip` dimensions."""
        spec = spec_of(parameter.shape[skip:], axes_of(parameter), table=table, mesh=self.mesh.shape)
        return NamedSharding(self.mesh, spec)

    def _gathered(self, variable: nnx.Variable) -> nnx.Variable:
        """Returns a parameter as computation needs it; inside a scan it has lost the axis of the layers."""
        if not isinstance(variable, nnx.Param):
            return variable
        axes = axes_of(variable)
        axes = axes[len(axes) - len(variable.shape) :]
        stored = self._here(variable.shape, axes)
        needed = self._here(variable.shape, axes, without=self._shared)
        return variable if stored == needed else variable.replace(_moved(variable[...], needed, stored))

    def _here(self, shape: tuple[int, ...], axes: tuple[str, ...], *, without: Collection[str] = ()) -> NamedSharding:
        """Returns a sharding for the function being traced, where some axes may have been taken by `shard_map`."""
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        spec = spec_of(shape, axes, table=self.table, mesh=self.mesh.shape, without={*without, *manual})
        return NamedSharding(mesh if manual else self.mesh, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(weight: jax.Array, needed: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Returns a weight where it is needed; its gradient goes back to where the weight is stored."""
    return jax.lax.with_sharding_constraint(weight, needed)


def _move(weight: jax.Array, needed: NamedSharding, stored: NamedSharding) -> tuple[jax.Array, None]:
    return _moved(weight, needed, stored), None


def _move_back(needed: NamedSharding, stored: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(grad, stored),)


_moved.defvjp(_move, _move_back)
