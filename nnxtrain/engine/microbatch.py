"""Microbatches of a split engine: checks of what it is given, and the handle that it returns."""

from typing import NamedTuple

import jax
import numpy as np

from nnxtrain.types import Batch


class EngineUseError(RuntimeError):
    """A call that is invalid in the current state of the engine, or a microbatch that does not fit it."""


class Handle(NamedTuple):
    """A microbatch in flight.

    Attributes:
        number: index in the step, from 0.
        sums: on device, metric name → (sum, count) of this microbatch alone.
    """

    number: int
    sums: dict[str, tuple[jax.Array, jax.Array]]

    def metrics(self) -> dict[str, float]:
        """Waits for the microbatch; returns its metrics, each sum divided by its count."""
        fetched = jax.device_get(self.sums)
        return {name: float(total) / max(float(count), 1.0) for name, (total, count) in fetched.items()}


def without_first(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the spec of one microbatch of a leaf `[m b ...]`."""
    sharding = leaf.sharding.update(spec=jax.sharding.PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def difference(microbatch: Batch, wanted: dict[str, jax.ShapeDtypeStruct]) -> str | None:
    """Returns how a microbatch differs from the compiled shapes and shardings, or None."""
    if microbatch.keys() != wanted.keys():
        return f"the microbatch has the keys {', '.join(sorted(microbatch))}; expected {', '.join(sorted(wanted))}"
    for name, leaf in wanted.items():
        found = microbatch[name]
        if not isinstance(found, jax.Array | np.ndarray) or found.shape != leaf.shape or found.dtype != leaf.dtype:
            shape = f"{found.dtype}{list(found.shape)}" if hasattr(found, "dtype") else f"a {type(found).__name__}"
            return f"{name} is {shape}, expected {leaf.dtype}{list(leaf.shape)}"
        if isinstance(found, jax.Array) and not found.sharding.is_equivalent_to(leaf.sharding, found.ndim):
            return f"{name} has sharding {found.sharding}, expected {leaf.sharding}"
    return None
