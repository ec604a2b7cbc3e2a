"""The step as one compiled program."""

from collections.abc import Iterator

import jax
from jax.profiler import TraceAnnotation

from nnxtrain.engine.base import Engine, flat
from nnxtrain.types import Batch, Metrics


class SingleEngine(Engine):
    """Runs forward, backward and update of all microbatches as one program."""

    def trace(self, batch: Batch) -> Iterator[tuple[str, jax.stages.Traced]]:
        """Yields the only program of a step, under the name of its function."""
        train_step = self._work.train_step

        def next_leaves(leaves: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
            state, metrics = train_step(self._merge(leaves), batch)
            return flat(state), metrics

        name = next_leaves.__name__ = train_step.__name__
        shardings = (self._shardings, self._replicated)
        yield name, jax.jit(next_leaves, donate_argnums=0, out_shardings=shardings).trace(self._shapes, batch)

    def step(self, batch: Batch) -> Metrics:
        """Runs a step on a batch, leaves `[m b ...]`; returns its metrics on device, without waiting for them."""
        (program,) = self._compiled.values()
        with TraceAnnotation("baseline_cycle"):  # the host cannot annotate microbatches inside one program
            self._leaves, metrics = program(self._leaves, batch)
        return metrics
