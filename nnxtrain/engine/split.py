"""The step as two compiled programs that a host drives: forward and backward of a microbatch, and the update."""

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
    """Runs one program for each microbatch, as they come, and one for the update.

    Sums of losses, targets and gradients wait on the devices between the calls, float32 and donated from one to the
    next; each copy of the model keeps its own, and they are added over devices by the update alone.
    """

    def __init__(self, work: Work):
        """Takes the work of a step, as `Engine` does."""
        super().__init__(work)
        self._sums: list[jax.Array] = []
        self._flight: deque[Metrics] = deque()
        self._microbatch: dict[str, jax.ShapeDtypeStruct] = {}
        self._metrics: Metrics | None = None
        self._evaluate: Callable[[Batch], tuple[jax.Array, jax.Array]] | None = None
        self._is_closed = False
        self.microbatches = 0  # in the sums

    def prepare(self, batch: Batch) -> None:
        """Learns what batches will be like: shapes, types and shardings, leaves `[m b ...]`."""
        self._microbatch = {name: without_first(leaf) for name, leaf in batch.items()}
        sums = self._work.abstract_sums(self._microbatch)
        self._sums_shapes, self._sums_tree = jax.tree.flatten(sums)
        self._sums_shardings = [leaf.sharding for leaf in self._sums_shapes]
        self._zeros = jax.jit(lambda: _zeros(self._sums_shapes), out_shardings=self._sums_shardings)
        count = batch["rows"].shape[0]
        self._cut = jax.jit(
            lambda batch: [{name: leaf[number] for name, leaf in batch.items()} for number in range(count)],
            out_shardings=[{name: leaf.sharding for name, leaf in self._microbatch.items()}] * count,
        )
        self._join = jax.jit(self._joined, out_shardings=self._whole_everywhere)

    def trace(self, batch: Batch) -> Iterator[tuple[str, jax.stages.Traced]]:
        """Yields both programs; `fwd_bwd` takes a microbatch of `batch`, leaves `[b ...]`."""
        self.prepare(batch)

        def fwd_bwd(leaves: list[jax.Array], sums: list[jax.Array], microbatch: Batch) -> tuple[list[jax.Array], Any]:
            more = self._work.forward_backward(self._merge(leaves), microbatch)
            with jax.named_scope("accumulate"):
                sums = list(map(jnp.add, sums, jax.tree.leaves(more)))
            return sums, self._work.sum_replicas(more.parts).sums

        def update(leaves: list[jax.Array], sums: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
            state, metrics = self._work.update(self._merge(leaves), self._joined(sums))
            return flat(state), _zeros(sums), metrics

        whole = self._whole_everywhere
        first = jax.jit(fwd_bwd, donate_argnums=1, out_shardings=(self._sums_shardings, whole))
        second = jax.jit(update, donate_argnums=(0, 1), out_shardings=(self._shardings, self._sums_shardings, whole))
        yield "fwd_bwd", first.trace(self._shapes, self._sums_shapes, self._microbatch)
        yield "update", second.trace(self._shapes, self._sums_shapes)

    def resident_bytes(self) -> int:
        """Returns the bytes of the sums on a device."""
        shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in self._sums_shapes)
        return sum(
            math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shards, self._sums_shapes, strict=True)
        )

    def initialise(self) -> None:
        """Draws the initial state, on the devices where it belongs; nothing is accumulated."""
        self._begin()
        super().initialise()

    def load(self, state: TrainStateNNX) -> None:
        """Takes a state that was restored; what was accumulated is dropped."""
        self._begin()
        super().load(state)

    def drop(self) -> None:
        """Frees the state and what was accumulated."""
        super().drop()
        self._sums, self.microbatches, self._metrics = [], 0, None
        self._flight.clear()

    def close(self) -> None:
        """Waits for what is in flight and frees everything; the engine is of no more use."""
        jax.block_until_ready((self._leaves, self._sums))
        self.drop()
        self._is_closed = True

    def fwd_bwd(self, microbatch: Batch) -> Handle:
        """Adds a microbatch, leaves `[b ...]`, to the sums of the step; returns at once.

        Raises:
            EngineUseError: the engine has no state, or the microbatch is not of the shapes that it was compiled for.
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
        """Moves the state by the sums of the microbatches since the last update; returns metrics while it still runs.

        Waits first, so that no more than `engine.max_inflight` updates are under way.

        Raises:
            EngineUseError: the engine has no state, or no microbatch came since the last update.
        """
        self._check_alive()
        if not self.microbatches:
            raise EngineUseError("update: nothing is accumulated; call fwd_bwd for at least one microbatch first")
        if len(self._flight) == self._work.max_inflight:
            jax.block_until_ready(self._flight.popleft())
        with TraceAnnotation("engine_update"):
            self._leaves, self._sums, metrics = self._compiled["update"](self._leaves, self._sums)
        self.microbatches = 0
        self._metrics = metrics
        self._flight.append(metrics)
        return metrics

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch, leaves `[m b ...]`, one microbatch after another; returns metrics while it still runs."""
        with TraceAnnotation("engine_cycle"):
            for microbatch in self._cut(batch):
                self._add(microbatch)
            return self.update()

    def accumulated(self) -> Sums:
        """Returns what the microbatches since the last update left behind, added over devices."""
        self._check_alive()
        return self._join(self._sums)

    def metrics(self) -> dict[str, Any]:
        """Waits for the last update; returns its metrics as python numbers.

        Raises:
            EngineUseError: there was no update of this state.
        """
        self._check_alive()
        if self._metrics is None:
            raise EngineUseError("metrics: there was no update yet")
        return {name: value.item() for name, value in jax.device_get(self._metrics).items()}

    def eval_step(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns cross-entropy summed over the targets of `batch` `[b ...]`, in nats, and their number."""
        self._check_alive()
        if self._evaluate is None:
            self._evaluate = self.bind_model(self._work.eval_step)
        return self._evaluate(batch)

    def save(self, folder: Path) -> None:
        """Writes the state, and what is accumulated, below `folder`, which is made new; returns when it is done."""
        self._check_alive()
        count = jax.device_put(np.int32(self.microbatches), self._whole_everywhere)
        self._work.write(folder, dict(zip(self._names(), [*self._leaves, *self._sums, count], strict=True)))

    def restore(self, folder: Path) -> None:
        """Goes on where `save` was called, in the middle of an accumulation window too.

        Raises:
            CheckpointError: what `folder` holds cannot be read, or is of another state; lists what differs.
        """
        self._check_open()
        counter = jax.ShapeDtypeStruct((), np.int32, sharding=self._whole_everywhere)
        shapes = [*self._shapes, *self._sums_shapes, counter]
        arrays = list(self._work.read(folder, dict(zip(self._names(), shapes, strict=True))).values())
        self.drop()
        self._leaves, self._sums = arrays[: len(self._shapes)], arrays[len(self._shapes) : -1]
        self.microbatches = int(arrays[-1])

    def _begin(self) -> None:
        """Forgets the state before, if there was one, and makes room for sums."""
        self._check_open()
        self.drop()
        self._sums = self._zeros()

    def _joined(self, sums: list[jax.Array]) -> Sums:
        return self._work.sum_replicas(jax.tree.unflatten(self._sums_tree, sums))

    def _names(self) -> list[str]:
        """Returns the names of all that `save` writes, in its order."""
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
    """Returns a name for each leaf of a tree, in its order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [f"{first}/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in flat]
