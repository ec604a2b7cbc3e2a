"""Layers scanned over stacked weights, or unrolled: the same values from two programs.

A pattern of `period` kinds of layer repeats over the model. The scan is over groups of `period` layers; if the pattern
does not divide the stack, the remaining layers follow it. A stack may have only some of the layers of a model, as in a
pipeline stage; the index of a layer is always its index in the model.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from nnxtrain.axes import LAYER, axes_of

# `(carry, layer, index of the layer, item of this layer, shared) -> (carry, item)`
Body = Callable[[Any, Any, jax.typing.ArrayLike, Any, Any], tuple[Any, Any]]

# `(index of the layer in the model, its kind) -> layer`; the index may be traced
MakeLayer = Callable[[jax.typing.ArrayLike, str], nnx.Module]


class Wrap(Protocol):
    """Wraps the computation of one layer, such as `jax.checkpoint` with a policy."""

    def __call__(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Returns a function of the same result; `in_loop` is whether it runs inside a `scan`."""
        ...


def no_wrap(function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
    """Returns `function`: a layer without wrapping."""
    return function


class Stack(Protocol):
    """Applies layers one after another."""

    def run(self, body: Body, carry: Any, items: Any, shared: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """Folds `body` over the layers.

        Args:
            body: the computation of one layer.
            carry: passed from layer to layer.
            items: a tree whose leaves have a leading layer axis `[l ...]`; each layer gets its slice.
            shared: a tree that every layer gets.
            wrap: wraps the body.
        Returns: the last carry, and the items that the layers returned, stacked `[l ...]`.
        """
        ...


class ScannedStack(nnx.Module):
    """One group of layers with parameters stacked over groups; program size does not grow with depth.

    Attributes:
        layer: the layer of a group, parameters `[l ...]`; for a pattern of several kinds, the list of its layers.
        rest: the remaining layers, each with its own parameters.
    """

    def __init__(self, layers: range, make_layer: MakeLayer, *, kinds: Sequence[str], period: int, unroll: int = 1):
        """Makes the stack.

        Args:
            layers: indices in the model, at least one.
            make_layer: makes one layer.
            kinds: kinds of all layers of the model.
            period: number of layers after which the kinds repeat.
            unroll: groups per iteration of the scan.
        """
        self.first, self.unroll = layers.start, unroll
        self.period = period = min(period, len(layers))
        self.groups = groups = len(layers) // period

        def group(number: jax.typing.ArrayLike) -> nnx.Module:
            first = layers.start + number * period
            made = [make_layer(first + place, kinds[layers.start + place]) for place in range(period)]
            return made[0] if period == 1 else nnx.List(made)

        graph = nnx.graphdef(nnx.eval_shape(lambda: group(0)))
        stacked = jax.vmap(lambda number: nnx.state(group(number)))(jnp.arange(groups))
        self.layer = nnx.merge(graph, stacked)
        for _, parameter in nnx.iter_graph(self.layer):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=(LAYER, *axes_of(parameter)))
        self.rest = nnx.List([make_layer(index, kinds[index]) for index in layers[groups * period :]])

    def run(self, body: Body, carry: Any, items: Any, shared: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """See `Stack.run`."""
        graph, stacked = nnx.split(self.layer)
        period, scanned = self.period, self.groups * self.period
        # a loop of one iteration is removed, and unrolling can leave groups outside the loop
        inside = functools.partial(wrap, in_loop=self.unroll == 1 and self.groups > 1)

        def group(carry: Any, part: tuple[nnx.State, jax.Array, Any]) -> tuple[Any, Any]:
            state, number, items = part
            made = nnx.merge(graph, state)
            layers = [made] if period == 1 else list(made)
            first = number * period + self.first if self.first else number * period
            return _apply_in_order(body, carry, layers, (items, shared), first=first, wrap=inside)

        grouped = jax.tree.map(lambda leaf: leaf[:scanned].reshape(self.groups, period, *leaf.shape[1:]), items)
        parts = (stacked, jnp.arange(self.groups), grouped)
        carry, returned = jax.lax.scan(group, carry, parts, unroll=self.unroll)
        returned = jax.tree.map(lambda leaf: leaf.reshape(scanned, *leaf.shape[2:]), returned)
        if not len(self.rest):
            return carry, returned
        left = jax.tree.map(lambda leaf: leaf[scanned:], items)
        outside = functools.partial(wrap, in_loop=False)
        first = self.first + scanned
        carry, last = _apply_in_order(body, carry, list(self.rest), (left, shared), first=first, wrap=outside)
        return carry, jax.tree.map(lambda *both: jnp.concatenate(both), returned, last)


class UnrolledStack(nnx.Module):
    """A list of layers, each with its own parameters."""

    def __init__(self, layers: range, make_layer: MakeLayer, *, kinds: Sequence[str]):
        self.first = layers.start
        self.layers = nnx.List([make_layer(index, kinds[index]) for index in layers])

    def run(self, body: Body, carry: Any, items: Any, shared: Any, *, wrap: Wrap) -> tuple[Any, Any]:
        """See `Stack.run`."""
        outside = functools.partial(wrap, in_loop=False)
        return _apply_in_order(body, carry, list(self.layers), (items, shared), first=self.first, wrap=outside)


def _apply_in_order(
    body: Body,
    carry: Any,
    layers: list[nnx.Module],
    inputs: tuple[Any, Any],
    *,
    first: jax.typing.ArrayLike,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[Any, Any]:
    """Folds `body` over `layers`, whose indices start at `first`; `inputs` are items and shared."""
    items, shared = inputs
    returned = []
    for place, layer in enumerate(layers):
        graph, state = nnx.split(layer)

        def one(
            carry: Any, state: nnx.State, index: Any, item: Any, shared: Any, graph: Any = graph
        ) -> tuple[Any, Any]:
            return body(carry, nnx.merge(graph, state), index, item, shared)

        item = jax.tree.map(lambda leaf: leaf[place], items)
        carry, item = wrap(one)(carry, state, first + place, item, shared)
        returned.append(item)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *returned)
