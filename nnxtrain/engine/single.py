"""The step as one compiled program over flat arrays."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.profiler import TraceAnnotation
from jax.sharding import NamedSharding, PartitionSpec

from nnxtrain.state import TrainStateNNX
from nnxtrain.types import Batch, Metrics, TrainStep


class SingleEngine:
    """Holds the state and moves it one step at a time.

    The object graph is taken apart here, once; a step passes a flat list of arrays, donates it, and gets the next one.

    Attributes:
        compile_s: seconds that lowering and compiling the step took.
        hlo_hash: of the lowered step without source locations.
        programs: names of the functions that it compiles, as jax reports them.
    """

    def __init__(
        self,
        make_state: Callable[[], TrainStateNNX],
        train_step: TrainStep,
        *,
        state: TrainStateNNX,
        batch: Batch,
    ):
        """Compiles the step; there is no state before `initialise` or `load`.

        Args:
            make_state: builds the state; it runs inside `jax.jit`, so that weights appear where they belong.
            train_step: consumes a state and a batch.
            state: shapes, types and shardings of the state.
            batch: shapes, types and shardings of the batches to come.
        """
        self._graph, abstract = nnx.split(state)
        shapes, self._tree = jax.tree.flatten(abstract)
        self._shardings = [leaf.sharding for leaf in shapes]
        self._whole_everywhere = NamedSharding(self._shardings[0].mesh, PartitionSpec())
        self._initial = jax.jit(lambda: self._flat(make_state()), out_shardings=self._shardings)
        self._leaves: list[jax.Array] = []
        began = time.monotonic()

        def next_leaves(leaves: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
            state, metrics = train_step(self._whole(leaves), batch)
            return self._flat(state), metrics

        self.programs = [train_step.__name__]
        next_leaves.__name__ = train_step.__name__
        shardings = (self._shardings, self._whole_everywhere)
        lowered = jax.jit(next_leaves, donate_argnums=0, out_shardings=shardings).lower(shapes, batch)
        self.hlo_hash = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
        self._step = lowered.compile()
        self.compile_s = time.monotonic() - began

    def initialise(self) -> None:
        """Draws the initial state, on the devices where it belongs."""
        self._leaves = self._initial()

    def load(self, state: TrainStateNNX) -> None:
        """Takes a state that was restored; an array that lies elsewhere is brought to where it belongs."""
        self._leaves = jax.device_put(self._flat(state), self._shardings)

    def drop(self) -> None:
        """Frees the state; `load` gives the engine another one."""
        self._leaves = []

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch, leaves `[m b ...]`; returns its metrics at once, on device, while the step still runs."""
        with TraceAnnotation("baseline_cycle"):  # microbatches are inside one program here, out of the host's sight
            self._leaves, metrics = self._step(self._leaves, batch)
        return metrics

    def memory(self) -> Any:
        """Returns what the compiler says of the bytes that a step needs: jax's `CompiledMemoryStats`."""
        return self._step.memory_analysis()

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function(state, *args)` compiled, with the state of the moment as its first argument.

        The state is only read: what `function` does to it is lost.
        """

        def of_leaves(leaves: list[jax.Array], *args: Any) -> Any:
            return function(self._whole(leaves), *args)

        of_leaves.__name__ = function.__name__
        self.programs.append(function.__name__)
        compiled = jax.jit(of_leaves, out_shardings=self._whole_everywhere)
        return lambda *args: compiled(self._leaves, *args)

    def state(self) -> TrainStateNNX:
        """Returns the state of the moment as modules; its arrays are gone with the next step."""
        return self._whole(self._leaves)

    def _whole(self, leaves: list[jax.Array]) -> TrainStateNNX:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))

    @staticmethod
    def _flat(state: TrainStateNNX) -> list[jax.Array]:
        return jax.tree.leaves(nnx.state(state))


ENGINES = {"single": SingleEngine}
