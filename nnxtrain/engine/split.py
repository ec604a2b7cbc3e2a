"""The step as two compiled programs: forward and backward of a microbatch, and the update."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation

from nnxtrain.engine.base import Engine, Work, flat
from nnxtrain.engine.microbatch import EngineUseError, Handle, difference, without_first
from nnxtrain.state import TrainStateNNX
from nnxtrain.types import Batch, Metrics, Sums


class SplitEngine(Engine):
    """Runs one program per microbatch and one for the update.

    Sums of losses, targets and gradients stay on the devices between calls, in float32, donated from call to call. Each
    replica of the model has its own; the update alone reduces them over replicas.
    """

    def __init__(self, work: Work):
        """Stores the work of a step, as `Engine` does."""
        super().__init__(work)
        self._sums: list[jax.Array] = []
        self._in_flight: deque[Metrics] = deque()
        self._microbatch: dict[str, jax.ShapeDtypeStruct] = {}
        self._metrics: Metrics | None = None
        self._evaluate: Callable[[Batch], tuple[jax.Array, jax.Array]] | None = None
        self._is_closed = False
        self.microbatches = 0  # accumulated since the last update

    def prepare(self, batch: Batch) -> None:
        """Records the shapes, types and shardings of batches, leaves `[m b ...]`."""
        self._microbatch = {name: without_first(leaf) for name, leaf in batch.items()}
        sums = self._work.abstract_sums(self._microbatch)
        self._sums_shapes, self._sums_tree = jax.tree.flatten(sums)
        self._sums_shardings = [leaf.sharding for leaf in self._sums_shapes]
        self._zeros = jax.jit(lambda: _zeros(self._sums_shapes), out_shardings=self._sums_shardings)
        count = batch["rows"].shape[0]
        self._split_batch = jax.jit(
            lambda batch: [{name: leaf[number] for name, leaf in batch.items()} for number in range(count)],
            out_shardings=[{name: leaf.sharding for name, leaf in self._microbatch.items()}] * count,
        )
        self._reduce = jax.jit(self._reduced, out_shardings=self._replicated)

    def trace(self, batch: Batch) -> Iterator[tuple[str, jax.stages.Traced]]:
        """Yields both programs; `fwd_bwd` takes a microbatch of `batch`, leaves `[b ...]`."""
        self.prepare(batch)

        def fwd_bwd(leaves: list[jax.Array], sums: list[jax.Array], microbatch: Batch) -> tuple[list[jax.Array], Any]:
            more = self._work.forward_backward(self._merge(leaves), microbatch)
            with jax.named_scope("accumulate"):
                sums = list(map(jnp.add, sums, jax.tree.leaves(more)))
            return sums, self._work.sum_replicas(more.parts).sums

        def update(leaves: list[jax.Array], sums: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
            state, metrics = self._work.update(self._merge(leaves), self._reduced(sums))
            return flat(state), _zeros(sums), metrics

        replicated = self._replicated
        first = jax.jit(fwd_bwd, donate_argnums=1, out_shardings=(self._sums_shardings, replicated))
        shardings = (self._shardings, self._sums_shardings, replicated)
        second = jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)
        yield "fwd_bwd", first.trace(self._shapes, self._sums_shapes, self._microbatch)
        yield "update", second.trace(self._shapes, self._sums_shapes)

    def resident_bytes(self) -> int:
        """Returns the bytes of the sums per device."""
        shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in self._sums_shapes)
        return sum(
            math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shards, self._sums_shapes, strict=True)
        )

    def initialise(self) -> None:
        """Draws the initial state, sharded over its devices; clears what was accumulated."""
        self._reset()
        super().initialise()

    def load(self, state: TrainStateNNX) -> None:
        """Sets the state to one that was restored; clears what was accumulated."""
        self._reset()
        super().load(state)

    def drop(self) -> None:
        """Frees the state and what was accumulated."""
        super().drop()
        self._sums, self.microbatches, self._metrics = [], 0, None
        self._in_flight.clear()

    def close(self) -> None:
        """Waits for programs in flight and frees everything; the engine cannot be used afterwards."""
        jax.block_until_ready((self._leaves, self._sums))
        self.drop()
        self._is_closed = True

    def fwd_bwd(self, microbatch: Batch) -> Handle:
        """Adds a microbatch, leaves `[b ...]`, to the sums of the step; returns at once.

        Raises:
            EngineUseError: the engine has no state, or the microbatch differs from the compiled shapes and shardings.
        """
        self._check_alive()
        if problem := difference(microbatch, self._microbatch):
            raise EngineUseError(f"fwd_bwd: {problem}; an engine is compiled for one shape of microbatch")
        return self._add(microbatch)

    def _add(self, microbatch: Batch) -> Handle:
        number = self.microbatches
        with TraceAnnotation(f"fwd_bwd_microstep_{number}"):
            self._sums, own = self._compiled["fwd_bwd"](self._leaves, self._sums, microbatch)
        self.microbatches += 1
        return Handle(number, own)

    def update(self) -> Metrics:
        """Updates the state by the accumulated sums; returns the metrics on device, without waiting for them.

        Waits first if `engine.max_inflight` updates are in flight.

        Raises:
            EngineUseError: the engine has no state, or no microbatch was added since the last update.
        """
        self._check_alive()
        if not self.microbatches:
            raise EngineUseError("update: nothing is accumulated; call fwd_bwd for at least one microbatch first")
        if len(self._in_flight) == self._work.max_inflight:
            jax.block_until_ready(self._in_flight.popleft())
        with TraceAnnotation("engine_update"):
            self._leaves, self._sums, metrics = self._compiled["update"](self._leaves, self._sums)
        self.microbatches = 0
        self._metrics = metrics
        self._in_flight.append(metrics)
        return metrics

    def step(self, batch: Batch) -> Metrics:
        """Runs a step on a batch, leaves `[m b ...]`; returns its metrics on device, without waiting for them."""
        with TraceAnnotation("engine_cycle"):
            for microbatch in self._split_batch(batch):
                self._add(microbatch)
            return self.update()

    def accumulated(self) -> Sums:
        """Returns the sums of the microbatches since the last update, reduced over replicas."""
        self._check_alive()
        return self._reduce(self._sums)

    def metrics(self) -> dict[str, Any]:
        """Waits for the last update; returns its metrics as python numbers.

        Raises:
            EngineUseError: this state was not updated yet.
        """
        self._check_alive()
        if self._metrics is None:
            raise EngineUseError("metrics: there was no update yet; call update first")
        return {name: value.item() for name, value in jax.device_get(self._metrics).items()}

    def eval_step(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the cross-entropy summed over the targets of `batch` `[b ...]`, in nats, and their number."""
        self._check_alive()
        if self._evaluate is None:
            self._evaluate = self.bind_model(self._work.eval_step)
        return self._evaluate(batch)

    def save(self, folder: Path) -> None:
        """Writes the state and the accumulated sums to the new folder `folder`; returns when they are on disk."""
        self._check_alive()
        count = jax.device_put(np.int32(self.microbatches), self._replicated)
        self._work.write(folder, dict(zip(self._names(), [*self._leaves, *self._sums, count], strict=True)))

    def restore(self, folder: Path) -> None:
        """Restores what `save` wrote, also between the microbatches of a step.

        Raises:
            CheckpointError: `folder` cannot be read, or its state does not match; lists the differences.
        """
        self._check_open()
        counter = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
        shapes = [*self._shapes, *self._sums_shapes, counter]
        arrays = list(self._work.read(folder, dict(zip(self._names(), shapes, strict=True))).values())
        self.drop()
        self._leaves, self._sums = arrays[: len(self._shapes)], arrays[len(self._shapes) : -1]
        self.microbatches = int(arrays[-1])

    def _reset(self) -> None:
        """Frees the previous state, if any, and sets the sums to zero."""
        self._check_open()
        self.drop()
        self._sums = self._zeros()

    def _reduced(self, sums: list[jax.Array]) -> Sums:
        return self._work.sum_replicas(jax.tree.unflatten(self._sums_tree, sums))

    def _names(self) -> list[str]:
        """Returns the names of the arrays that `save` writes, in its order."""
        states = jax.tree.unflatten(self._tree, self._shapes)
        sums = jax.tree.unflatten(self._sums_tree, self._sums_shapes)
        return [*_paths("state", states), *_paths("sums", sums), "microbatches"]

    def _check_alive(self) -> None:
        self._check_open()
        if not self._leaves:
            raise EngineUseError("the engine has no state; call initialise, load or restore first")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineUseError("the engine was closed; make a new one")
        if not self._compiled:
            raise EngineUseError("the engine is not compiled; call compile first")


def _zeros(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in arrays]


def _paths(first: str, tree: Any) -> list[str]:
    """Returns a name for each leaf of a tree, in order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [f"{first}/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in flat]
