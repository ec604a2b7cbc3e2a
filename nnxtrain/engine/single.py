"""The step as one compiled program over flat arrays."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.profiler import TraceAnnotation

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
        sharding: jax.sharding.Sharding,
        batch: Batch,
    ):
        """Compiles the step; there is no state before `initialise` or `load`.

        Args:
            make_state: builds the state; it runs inside `jax.jit`, so that weights appear where they belong.
            train_step: consumes a state and a batch.
            sharding: of every array of the state.
            batch: shapes, types and shardings of the batches to come.
        """
        self._graph, abstract = nnx.split(nnx.eval_shape(make_state))
        self._tree = jax.tree.structure(abstract)
        self._initial = jax.jit(lambda: self._flat(make_state()), out_shardings=sharding)
        self._leaves: list[jax.Array] = []
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in jax.tree.leaves(abstract)]
        began = time.monotonic()

        def next_leaves(leaves: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
            state, metrics = train_step(self._whole(leaves), batch)
            return self._flat(state), metrics

        self.programs = [train_step.__name__]
        next_leaves.__name__ = train_step.__name__
        lowered = jax.jit(next_leaves, donate_argnums=0, out_shardings=(sharding, None)).lower(shapes, batch)
        self.hlo_hash = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
        self._step = lowered.compile()
        self.compile_s = time.monotonic() - began

    def initialise(self) -> None:
        """Draws the initial state, on the devices where it belongs."""
        self._leaves = self._initial()

    def load(self, state: TrainStateNNX) -> None:
        """Takes a state that was restored, its arrays on the devices where they belong."""
        self._leaves = self._flat(state)

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
        compiled = jax.jit(of_leaves)
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
