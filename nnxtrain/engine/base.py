"""The base of all engines: a state as flat arrays, programs that are traced and then compiled, bound functions."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnxtrain.optim.averages import evaluation_model
from nnxtrain.state import TrainStateNNX
from nnxtrain.types import Batch, Collect, EvalStep, Metrics, Sums, TrainStep, Update


class Work(Protocol):
    """The functions and shapes that an engine compiles a step from."""

    @property
    def make_state(self) -> Callable[[], TrainStateNNX]:
        """Builds the state; it runs inside `jax.jit`, so that weights are created sharded."""
        ...

    @property
    def train_step(self) -> TrainStep:
        """The complete training step."""
        ...

    @property
    def forward_backward(self) -> Collect:
        """Sums of one microbatch with leaves `[b ...]`, as leaves `[c ...]`: one entry per replica of the model."""
        ...

    @property
    def update(self) -> Update:
        """Updates the state by the sums of a step."""
        ...

    @property
    def eval_step(self) -> EvalStep:
        """Returns the summed loss of a batch and its number of targets."""
        ...

    @property
    def max_inflight(self) -> int:
        """Maximum number of updates in flight."""
        ...

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """Compiler options by name."""
        ...

    def sum_replicas(self, sums: Any) -> Any:
        """Adds the sums of all replicas of the model: leaves `[c ...]` become `[...]`."""
        ...

    def abstract_state(self) -> TrainStateNNX:
        """Returns the state as modules of shapes, types and shardings."""
        ...

    def abstract_sums(self, microbatch: Batch) -> Sums:
        """Returns shapes, types and shardings of what `forward_backward` returns for an abstract microbatch."""
        ...

    def write(self, folder: Path, arrays: Mapping[str, jax.Array]) -> None:
        """Writes named arrays below `folder`."""
        ...

    def read(self, folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, jax.Array]:
        """Returns the written arrays in the order of `wanted`; raises if they differ from `wanted`."""
        ...


class Engine(ABC):
    """Owns the state and advances it one step at a time.

    The object graph is split once, here; a step takes a flat list of arrays, donates it, and returns the next one.

    Attributes:
        compile_s: seconds that lowering and compiling took.
        hlo_hash: of the lowered programs, without source locations.
        programs: names of the compiled functions, as jax reports them.
    """

    def __init__(self, work: Work):
        """Stores the work of a step; `compile` then compiles it, and `initialise` or `load` sets the state."""
        self._work = work
        self._graph, abstract = nnx.split(work.abstract_state())
        self._shapes, self._tree = jax.tree.flatten(abstract)
        self._shardings = [leaf.sharding for leaf in self._shapes]
        self._replicated = NamedSharding(self._shardings[0].mesh, PartitionSpec())
        self._initial = jax.jit(lambda: flat(work.make_state()), out_shardings=self._shardings)
        self._leaves: list[jax.Array] = []
        self._compiled: Mapping[str, jax.stages.Compiled] = {}
        self.programs: list[str] = []
        self.compile_s = 0.0
        self.hlo_hash = ""

    @abstractmethod
    def trace(self, batch: Batch) -> Iterator[tuple[str, jax.stages.Traced]]:
        """Yields each program of a step by name, traced for batches like `batch`, leaves `[m b ...]`."""

    @abstractmethod
    def step(self, batch: Batch) -> Metrics:
        """Runs a step on a batch, leaves `[m b ...]`; returns its metrics on device, without waiting for them."""

    def compile(self, batch: Batch) -> None:
        """Compiles the programs of a step for batches like `batch`."""
        began = time.monotonic()
        lowered = {name: traced.lower() for name, traced in self.trace(batch)}
        options = dict(self._work.compiler_options)
        compiled = {name: each.compile(compiler_options=options) for name, each in lowered.items()}
        self.use(compiled, batch, hlo_hash=hash_of(lowered))
        self.compile_s = time.monotonic() - began

    def prepare(self, batch: Batch) -> None:  # noqa: B027
        """Records the shapes, types and shardings of batches, leaves `[m b ...]`."""

    def use(self, compiled: Mapping[str, jax.stages.Compiled], batch: Batch, *, hlo_hash: str) -> None:
        """Sets the programs of a step, compiled for batches like `batch`."""
        self.prepare(batch)
        self._compiled = compiled
        self.programs += compiled
        self.hlo_hash = hlo_hash

    def memory(self) -> dict[str, Any]:
        """Returns the memory that each program needs, as the compiler reports it: jax's `CompiledMemoryStats`."""
        return {name: program.memory_analysis() for name, program in self._compiled.items()}

    def resident_bytes(self) -> int:
        """Returns the bytes per device that are kept between steps, besides the state."""
        return 0

    def initialise(self) -> None:
        """Draws the initial state, sharded over its devices."""
        self._leaves = self._initial()

    def load(self, state: TrainStateNNX) -> None:
        """Sets the state to one that was restored; arrays that are placed differently are resharded."""
        self._leaves = jax.device_put(flat(state), self._shardings)

    def drop(self) -> None:
        """Frees the state; `load` sets another one."""
        self._leaves = []

    def state(self) -> TrainStateNNX:
        """Returns the current state as modules; the next step donates its arrays."""
        return self._merge(self._leaves)

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function(state, *args)` compiled, with the current state as its first argument.

        The state is only read: changes that `function` makes to it are discarded.
        """
        compiled = self._jit(function)
        self.programs.append(function.__name__)
        return lambda *args: compiled(self._leaves, *args)

    def bind_model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function(model, *args)` compiled, with the current evaluation model as its first argument."""
        return self.bind(_of_model(function))

    def trace_model(self, function: Callable[..., Any], *args: Any) -> jax.stages.Traced:
        """Returns the trace of what `bind_model` compiles, for arguments of these shapes, types and shardings."""
        return self._jit(_of_model(function)).trace(self._shapes, *args)

    def _jit(self, function: Callable[..., Any]) -> Any:
        def of_leaves(leaves: list[jax.Array], *args: Any) -> Any:
            return function(self._merge(leaves), *args)

        of_leaves.__name__ = function.__name__
        options = dict(self._work.compiler_options)
        return jax.jit(of_leaves, out_shardings=self._replicated, compiler_options=options)

    def _merge(self, leaves: list[jax.Array]) -> TrainStateNNX:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))


def flat(state: TrainStateNNX) -> list[jax.Array]:
    """Returns the arrays of a state in the order in which engines pass them."""
    return jax.tree.leaves(nnx.state(state))


def hash_of(lowered: Mapping[str, jax.stages.Lowered]) -> str:
    """Returns a hash of programs that depends on their operations, not on line numbers."""
    digest = hashlib.sha256()
    for _, program in sorted(lowered.items()):
        digest.update(program.as_text().encode())
    return digest.hexdigest()[:16]


def _of_model(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_state(state: TrainStateNNX, *args: Any) -> Any:
        return function(evaluation_model(state), *args)

    of_state.__name__ = function.__name__
    return of_state
