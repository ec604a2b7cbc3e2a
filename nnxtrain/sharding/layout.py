"""Shardings of weights, optimizer state and activations on a mesh."""

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
    """Shardings of arrays on one mesh, by the logical axis names of their dimensions."""

    def __init__(self, mesh: Mesh | AbstractMesh, rules: Iterable[str]):
        """Applies `rules` (`mesh.rules`) to the default table."""
        self.mesh = mesh
        self.table, self.optimizer_table = tables(rules)
        self._token_axes = {
            *self.table[BATCH],
            *self.table[SEQUENCE],
        }  # weights are gathered along these for computation

    def axes(self, logical: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that shard a logical axis."""
        return tuple(name for name in self.table[logical] if self.mesh.shape[name] > 1)

    def activations(self, x: jax.Array, *axes: str) -> jax.Array:
        """Returns `x` with a sharding constraint from the logical names of its dimensions."""
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, self._traced_sharding(x.shape, axes))

    def weights(self, module: Any) -> Any:
        """Returns a module with weights gathered along the axes of batch and sequence; gradients are resharded back."""
        if self.mesh.size == 1:
            return module
        graph, state = nnx.split(module)
        gathered = jax.tree.map(self._gathered, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return nnx.merge(graph, gathered)

    def lookup(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the embeddings of tokens; vectors are communicated, the table is not.

        Each device looks up all ids that are in its shard of the table. If a device has fewer tokens than the
        vocabulary has ids, this needs less traffic and memory than gathering the table and its gradient.

        Args:
            table: `[v d]`.
            ids: `[b s]`, each in the table.
        Returns: `[b s d]`, sharded along `d` as the table is, along `b` and `s` by axes that do not shard the table.
        """
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        spec = functools.partial(spec_of, table=self.table, mesh=self.mesh.shape)
        stored = spec(table.shape, (VOCAB, EMBED), without=manual)
        vocab_axes, columns = (names_of(entry) for entry in (*stored, None, None)[:2])
        rows = spec(ids.shape, (BATCH, SEQUENCE), without={*manual, *vocab_axes, *columns})

        if not (axis_names := {name for entry in (*stored, *rows) for name in names_of(entry)}):
            return jnp.take(table, ids, axis=0)

        def local(table: jax.Array, ids: jax.Array) -> jax.Array:
            if not vocab_axes:
                return jnp.take(table, ids, axis=0)
            local_ids = ids - jax.lax.axis_index(vocab_axes) * len(table)
            is_local = (local_ids >= 0) & (local_ids < len(table))
            vectors = jnp.take(table, jnp.where(is_local, local_ids, 0), axis=0)
            return jax.lax.psum(jnp.where(is_local[..., None], vectors, 0), vocab_axes)

        return jax.shard_map(
            local,
            mesh=mesh if manual else self.mesh,
            axis_names=axis_names,
            in_specs=(stored, rows),
            out_specs=PartitionSpec(*(*rows, None, None)[:2], columns or None),
            check_vma=False,
        )(table, ids)

    def pick(self, scores: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the score `[b s]` of each id from `[b s v]`; needs no gather where the vocabulary is sharded."""
        if not self.axes(VOCAB):
            return jnp.take_along_axis(scores, ids[..., None], axis=-1)[..., 0]
        is_id = jnp.arange(scores.shape[-1]) == ids[..., None]
        return jnp.sum(jnp.where(is_id, scores, 0), axis=-1)

    def state(self, state: nnx.State) -> nnx.State:
        """Returns the shapes and types of a train state with the sharding of each leaf.

        A leaf whose path ends like that of a parameter of the same shape is sharded by the table for optimizer state;
        any other leaf that is not a parameter is replicated.
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

    def sums(self, shapes: Any, *, replica_axes: tuple[str, ...]) -> Any:
        """Returns abstract sums of a microbatch, leaves `[c ...]`, with the sharding of each leaf.

        Gradients are sharded as their parameters; `replica_axes` shard the leading dimension.
        """

        def placed(leaf: Any) -> Any:
            array = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            own = self._stored(leaf, self.table, skip=1).spec if isinstance(leaf, nnx.Param) else ()
            sharding = NamedSharding(self.mesh, PartitionSpec(replica_axes or None, *own))
            abstract = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            return leaf.replace(abstract) if isinstance(leaf, nnx.Variable) else abstract

        return jax.tree.map(placed, shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def specs_over(self, weights: Any, names: Collection[str]) -> Any:
        """Returns a `PartitionSpec` for each variable of a tree, with the mesh axes in `names` alone.

        If other axes come first along the same dimension, `shard_map` reshards the array.
        """

        def spec(variable: nnx.Variable) -> PartitionSpec:
            stored = self._stored(variable, self.table).spec if isinstance(variable, nnx.Param) else ()
            return PartitionSpec(
                *(tuple(axis for axis in names_of(entry) if axis in names) or None for entry in stored)
            )

        return jax.tree.map(spec, weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _stored(self, parameter: nnx.Variable, table: Table, *, skip: int = 0) -> NamedSharding:
        """Returns the sharding of a parameter; its first `skip` dimensions are leading ones without a logical name."""
        spec = spec_of(parameter.shape[skip:], axes_of(parameter), table=table, mesh=self.mesh.shape)
        return NamedSharding(self.mesh, spec)

    def _gathered(self, variable: nnx.Variable) -> nnx.Variable:
        """Returns a parameter as computation needs it; inside a scan it has no layer axis."""
        if not isinstance(variable, nnx.Param):
            return variable
        axes = axes_of(variable)
        axes = axes[len(axes) - len(variable.shape) :]
        stored = self._traced_sharding(variable.shape, axes)
        needed = self._traced_sharding(variable.shape, axes, without=self._token_axes)
        return variable if stored == needed else variable.replace(_resharded(variable[...], needed, stored))

    def _traced_sharding(
        self, shape: tuple[int, ...], axes: tuple[str, ...], *, without: Collection[str] = ()
    ) -> NamedSharding:
        """Returns a sharding for the function being traced; mesh axes that are manual in `shard_map` are left out."""
        mesh = jax.sharding.get_abstract_mesh()
        manual = mesh.manual_axes
        spec = spec_of(shape, axes, table=self.table, mesh=self.mesh.shape, without={*without, *manual})
        return NamedSharding(mesh if manual else self.mesh, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(weight: jax.Array, needed: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Returns a weight with the sharding `needed`; its gradient gets the sharding `stored`."""
    return jax.lax.with_sharding_constraint(weight, needed)


def _resharded_fwd(weight: jax.Array, needed: NamedSharding, stored: NamedSharding) -> tuple[jax.Array, None]:
    return _resharded(weight, needed, stored), None


def _resharded_bwd(needed: NamedSharding, stored: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(grad, stored),)


_resharded.defvjp(_resharded_fwd, _resharded_bwd)
