"""The step as two compiled programs that a host drives: forward and backward of a microbatch, and the update."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation

from nnxtrain.engine.base import Engine, Work, flat
from nnxtrain.types import Batch, Metrics, Sums


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
        self._microbatch = {name: _without_first(leaf) for name, leaf in batch.items()}
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
            more = self._work.forward_backward(self._whole(leaves), microbatch)
            with jax.named_scope("accumulate"):
                sums = list(map(jnp.add, sums, jax.tree.leaves(more)))
            return sums, self._work.join(more.parts).sums

        def update(leaves: list[jax.Array], sums: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array], Metrics]:
            state, metrics = self._work.update(self._whole(leaves), self._joined(sums))
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
        super().initialise()
        self._sums, self.microbatches = self._zeros(), 0

    def load(self, state: Any) -> None:
        """Takes a state that was restored; what was accumulated is dropped."""
        super().load(state)
        self._sums, self.microbatches = self._zeros(), 0

    def drop(self) -> None:
        """Frees the state and what was accumulated."""
        super().drop()
        self._sums, self.microbatches = [], 0
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
        if problem := _difference(microbatch, self._microbatch):
            raise EngineUseError(f"fwd_bwd: {problem}; an engine is compiled for one shape of microbatch")
        number = self.microbatches
        with TraceAnnotation(f"fwd_bwd_microstep_{number}"):
            self._sums, own = self._compiled["fwd_bwd"](self._leaves, self._sums, microbatch)
        self.microbatches += 1
        return Handle(number, own)

    def update(self) -> Metrics:
        """Moves the state by the sums of the microbatches since the last update; returns metrics while it still runs.

        Waits if more than `engine.max_inflight` updates would be under way.

        Raises:
            EngineUseError: the engine has no state, or no microbatch came since the last update.
        """
        self._check_alive()
        if not self.microbatches:
            raise EngineUseError("update: nothing is accumulated; call fwd_bwd for at least one microbatch first")
        with TraceAnnotation("engine_update"):
            self._leaves, self._sums, metrics = self._compiled["update"](self._leaves, self._sums)
        self.microbatches = 0
        self._metrics = metrics
        self._flight.append(metrics)
        if len(self._flight) > self._work.max_inflight:
            jax.block_until_ready(self._flight.popleft())
        return metrics

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch, leaves `[m b ...]`, one microbatch after another; returns metrics while it still runs."""
        with TraceAnnotation("engine_cycle"):
            for microbatch in self._cut(batch):
                self.fwd_bwd(microbatch)
            return self.update()

    def accumulated(self) -> Sums:
        """Returns what the microbatches since the last update left behind, added over devices."""
        self._check_alive()
        return self._join(self._sums)

    def metrics(self) -> dict[str, Any]:
        """Waits for the last update; returns its metrics as python numbers.

        Raises:
            EngineUseError: there was no update.
        """
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
        counter = jax.ShapeDtypeStruct((), np.int32, sharding=self._whole_everywhere)
        shapes = [*self._shapes, *self._sums_shapes, counter]
        arrays = list(self._work.read(folder, dict(zip(self._names(), shapes, strict=True))).values())
        self._leaves, self._sums = arrays[: len(self._shapes)], arrays[len(self._shapes) : -1]
        self.microbatches = int(arrays[-1])
        self._flight.clear()

    def _joined(self, sums: list[jax.Array]) -> Sums:
        return self._work.join(jax.tree.unflatten(self._sums_tree, sums))

    def _names(self) -> list[str]:
        """Returns the names of all that `save` writes, in its order."""
        states = jax.tree.unflatten(self._tree, self._shapes)
        sums = jax.tree.unflatten(self._sums_tree, self._sums_shapes)
        return [*_paths("state", states), *_paths("sums", sums), "microbatches"]

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineUseError("the engine was closed; make a new one")
        if not self._leaves:
            raise EngineUseError("the engine has no state; call initialise, load or restore first")


def _zeros(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in arrays]


def _without_first(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the spec of one microbatch of a leaf `[m b ...]`."""
    place = leaf.sharding.update(spec=jax.sharding.PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)


def _difference(microbatch: Batch, wanted: dict[str, jax.ShapeDtypeStruct]) -> str | None:
    """Returns how a microbatch differs from what was compiled for, or None."""
    if microbatch.keys() != wanted.keys():
        return f"the microbatch has {', '.join(sorted(microbatch))}; wanted are {', '.join(sorted(wanted))}"
    for name, leaf in wanted.items():
        if microbatch[name].shape != leaf.shape or microbatch[name].dtype != leaf.dtype:
            found = f"{microbatch[name].dtype}{list(microbatch[name].shape)}"
            return f"{name} is {found}, wanted {leaf.dtype}{list(leaf.shape)}"
    return None


def _paths(first: str, tree: Any) -> list[str]:
    """Returns a name for each leaf of a tree, in its order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [f"{first}/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in flat]
