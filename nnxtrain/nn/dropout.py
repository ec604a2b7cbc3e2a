"""Dropout whose masks depend on the row of the global batch, and so not on sharding or microbatches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class Dropout(Protocol):
    """Drops activations; `at` derives the dropout of a layer, then of one place in the layer."""

    def at(self, place: jax.typing.ArrayLike) -> "Dropout":
        """Returns the dropout of one layer or place, by its number."""
        ...

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[b s d]` to `[b s d]`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeepAll:
    """Drops nothing: for evaluation, generation, and training without dropout."""

    def at(self, place: jax.typing.ArrayLike) -> "KeepAll":
        """Returns itself."""
        return self

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x`."""
        return x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclass(frozen=True)
class RowDropout:
    """Drops each activation with probability `rate`; a pure function of (key, row, place)."""

    rate: float
    keys: jax.Array

    @classmethod
    def of_rows(cls, rate: float, key: jax.Array, rows: jax.Array) -> "RowDropout":
        """Returns the dropout of a step, from its `key` and the indices `rows` `[b]` in the global batch."""
        return cls(rate, _fold(key, rows))

    def at(self, place: jax.typing.ArrayLike) -> "RowDropout":
        """Returns the dropout of one layer or place, by its number."""
        return RowDropout(self.rate, jax.vmap(lambda key: jax.random.fold_in(key, place))(self.keys))

    @jax.named_scope("dropout")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[b s d]` to `[b s d]`; kept values are scaled by `1 / (1 - rate)`."""
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, x.shape[1:]))(self.keys)
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)


_fold: Callable[[jax.Array, jax.Array], jax.Array] = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
