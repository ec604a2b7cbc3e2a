"""Layers scanned over stacked weights, or unrolled: the same numbers, two programs."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import LAYER, axes_of

# `(carry, layer, index of the layer, item of this layer) -> (carry, item)`
Body = Callable[[Any, Any, jax.typing.ArrayLike, Any], tuple[Any, Any]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Stack(Protocol):
    """Applies layers one after another."""

    def run(self, body: Body, carry: Any, items: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """Folds `body` over the layers.

        Args:
            body: what happens at one layer.
            carry: what goes from layer to layer.
            items: a tree whose leaves have a leading layer axis `[l ...]`; a layer gets its own slice.
            wrap: put around the body's computation, such as `jax.checkpoint` with a policy.
        Returns: the last carry, and the items that the layers returned, stacked.
        """
        ...


class ScannedStack(nnx.Module):
    """One layer whose parameters are `[l ...]`; the program does not grow with depth."""

    def __init__(self, layers: int, make_layer: Callable[[jax.typing.ArrayLike], nnx.Module]):
        graph = nnx.graphdef(nnx.eval_shape(lambda: make_layer(0)))
        stacked = jax.vmap(lambda index: nnx.state(make_layer(index)))(jnp.arange(layers))
        self.layer = nnx.merge(graph, stacked)
        for _, parameter in nnx.iter_graph(self.layer):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=(LAYER, *axes_of(parameter)))

    def run(self, body: Body, carry: Any, items: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """See `Stack.run`."""
        graph, stacked = nnx.split(self.layer)
        layers = jax.tree.leaves(stacked)[0].shape[0]

        def one(carry: Any, scanned: tuple[nnx.State, jax.Array, Any]) -> tuple[Any, Any]:
            state, index, item = scanned
            return body(carry, nnx.merge(graph, state), index, item)

        return jax.lax.scan(wrap(one), carry, (stacked, jnp.arange(layers), items))


class UnrolledStack(nnx.Module):
    """A list of layers, each with parameters of its own."""

    def __init__(self, layers: int, make_layer: Callable[[jax.typing.ArrayLike], nnx.Module]):
        self.layers = nnx.List([make_layer(index) for index in range(layers)])

    def run(self, body: Body, carry: Any, items: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """See `Stack.run`."""
        returned = []
        for index, layer in enumerate(self.layers):
            graph, state = nnx.split(layer)

            def one(carry: Any, state: nnx.State, item: Any, graph=graph, index=index) -> tuple[Any, Any]:
                return body(carry, nnx.merge(graph, state), index, item)

            carry, item = wrap(one)(carry, state, jax.tree.map(lambda leaf, index=index: leaf[index], items))
            returned.append(item)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *returned)
