"""What passes between a host that drives microbatches and the engine: what may come, and what is given back."""

from typing import NamedTuple

import jax
import numpy as np

from nnxtrain.types import Batch


class EngineUseError(RuntimeError):
    """A call that this engine cannot follow, at this moment or with this microbatch."""


class Handle(NamedTuple):
    """A microbatch on its way.

    Attributes:
        number: of microbatches before it in the sums.
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
    place = leaf.sharding.update(spec=jax.sharding.PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)


def difference(microbatch: Batch, wanted: dict[str, jax.ShapeDtypeStruct]) -> str | None:
    """Returns how a microbatch differs from what was compiled for, or None."""
    if microbatch.keys() != wanted.keys():
        return f"the microbatch has {', '.join(sorted(microbatch))}; wanted are {', '.join(sorted(wanted))}"
    for name, leaf in wanted.items():
        found = microbatch[name]
        if not isinstance(found, jax.Array | np.ndarray) or found.shape != leaf.shape or found.dtype != leaf.dtype:
            shape = f"{found.dtype}{list(found.shape)}" if hasattr(found, "dtype") else f"a {type(found).__name__}"
            return f"{name} is {shape}, wanted {leaf.dtype}{list(leaf.shape)}"
        if isinstance(found, jax.Array) and not found.sharding.is_equivalent_to(leaf.sharding, found.ndim):
            return f"{name} lies on {found.sharding}, wanted {leaf.sharding}"
    return None
