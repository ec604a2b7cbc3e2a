"""The trial of `compare_training_engine.py`: the same steps by the split engine, the single step, one large batch.

Batches have uneven masks and padding and, where there are several microbatches, an empty one; the learning rate falls;
dropout and z-loss are on. Gradients are clipped, and a batch with a single target is a spike that the guard skips: a
trial in which one of these two did not happen proves nothing and is an error.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from nnxtrain.build.program import Program, make_program
from nnxtrain.build.registry import Registry
from nnxtrain.config.load import load
from nnxtrain.engine.base import Engine
from nnxtrain.engine.split import SplitEngine
from nnxtrain.errors import UserError
from nnxtrain.state import TrainStateNNX
from nnxtrain.types import Batch, Metrics, Sums

CLIP_NORM = 0.05
TRIAL = (
    f"optimizer.clip_norm={CLIP_NORM} optimizer.eps=1e-4 loss.z_loss=1e-3 model.dropout=0.1 schedule.name=linear "
    "schedule.warmup_steps=0 steps=8 debug.on_nonfinite=skip debug.spike_deviations=3 debug.spike_warmup_steps=2"
).split()
STEPS, SPIKE = 5, 3  # number of steps, and the step whose batch has a single target

# tolerances: of metrics relative to the value, of arrays relative to the largest value of the leaf
TOLERANCES = {"float32": {"metrics": 1e-5, "arrays": 1e-5}, "bfloat16": {"metrics": 2e-2, "arrays": 1e-1}}
LOSSES = 1e-6  # of losses in float32

Arrays = dict[str, np.ndarray]


class Worst(NamedTuple):
    """The largest difference between two trees: its path, and its size relative to the largest value there."""

    path: str
    error: float


class Outcome(NamedTuple):
    """Results of one side of the trial.

    Attributes:
        metrics: of each step, as Python numbers.
        arrays: weights, moments, counters and guard at the end, by path.
    """

    metrics: list[dict[str, Any]]
    arrays: Arrays


class Trial(NamedTuple):
    """Results of all sides.

    Attributes:
        outcomes: by side.
        gradients: of the first step, per target, by path, of each side that has them.
        counts: accumulated microbatches before and after each update, and whether the sums were zero after it.
    """

    outcomes: dict[str, Outcome]
    gradients: dict[str, Arrays]
    counts: list[tuple[int, int, bool]]


class WatchedEngine:
    """Drives the split engine microbatch by microbatch, and records its sums.

    Attributes:
        gradients: of the first step, per target, by path.
        counts: as in `Trial`.
    """

    def __init__(self, engine: SplitEngine):
        """Initialises the engine."""
        engine.initialise()
        self._engine = engine
        self.gradients: Arrays = {}
        self.counts: list[tuple[int, int, bool]] = []

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch, leaves `[m b ...]`."""
        engine = self._engine
        for number in range(len(batch["rows"])):
            engine.fwd_bwd({name: leaf[number] for name, leaf in batch.items()})
        before = engine.microbatches
        if not self.counts:
            self.gradients = _gradients(engine.accumulated())
        metrics = engine.update()
        is_zero = all(not leaf.any() for leaf in by_path(engine.accumulated()).values())
        self.counts.append((before, engine.microbatches, is_zero))
        return metrics

    def state(self) -> TrainStateNNX:
        """Returns the current state."""
        return self._engine.state()


class EagerEngine:
    """Calls the functions of the split engine from Python, one after another, without `jax.jit`."""

    def __init__(self, program: Program):
        """Initialises the state."""
        self._program = program
        self._state = jax.jit(program.make_state)()

    def step(self, batch: Batch) -> Metrics:
        """Consumes a batch, leaves `[m b ...]`."""
        sums = None
        for number in range(len(batch["rows"])):
            microbatch = {name: leaf[number] for name, leaf in batch.items()}
            more = self._program.forward_backward(self._state, microbatch)
            sums = more if sums is None else jax.tree.map(jax.numpy.add, sums, more)
        self._state, metrics = self._program.update(self._state, self._program.sum_replicas(sums))
        return metrics

    def state(self) -> TrainStateNNX:
        """Returns the current state."""
        return self._state


def program_of(path: str, words: list[str], *, rows: int, microbatches: int, registry: Registry) -> Program:
    """Returns the program of a configuration with `microbatches` of `rows` rows."""
    sizes = [f"batch.global_size={rows * microbatches}", f"batch.accum_steps={microbatches}"]
    return make_program(load(path, [*words, *sizes]), registry=registry)


def run_trial(
    path: str, words: list[str], *, rows: int, microbatches: int, not_compiled: bool, registry: Registry
) -> Trial:
    """Runs the trial on each side; returns the results.

    Args:
        path: of the configuration.
        words: that override it, including the compute dtype.
        rows: of a microbatch.
        microbatches: of a step.
        not_compiled: whether to run the first step operation by operation too, which is slow.
        registry: in which `engine.name` is looked up.

    Raises:
        UserError: nothing was clipped or skipped, so that the trial proves nothing.
    """
    own = [*words, *TRIAL]
    many = program_of(path, [*own, "engine.name=split"], rows=rows, microbatches=microbatches, registry=registry)
    batches = [trial_batch(many, seed=seed) for seed in range(STEPS)]
    one = program_of(path, [*own, "engine.name=single"], rows=rows * microbatches, microbatches=1, registry=registry)
    single = program_of(path, [*own, "engine.name=single"], rows=rows, microbatches=microbatches, registry=registry)
    engine = many.make_engine()
    if not isinstance(engine, SplitEngine):
        raise UserError(f"engine.name=split is {type(engine).__name__} here, which takes no microbatches")
    outcomes = {
        "single step": follow(single, _started(single.make_engine()), batches),
        "large batch": follow(one, _started(one.make_engine()), batches),
        "first step": follow(many, WatchedEngine(engine), batches[:1]),
    }
    watched = WatchedEngine(engine)
    outcomes["engine"] = follow(many, watched, batches)
    if not_compiled and many.mesh.size == 1:  # jax can run a `shard_map` over some axes of a mesh only under jit
        outcomes["not compiled"] = follow(many, EagerEngine(many), batches[:1])
    metrics = outcomes["single step"].metrics
    clipped = sum(row["grad_norm"] > CLIP_NORM and not row["skipped"] for row in metrics)
    skipped = [number for number, row in enumerate(metrics) if row["skipped"]]
    if not clipped or not skipped:
        raise UserError(f"the trial proves nothing: {clipped} steps were clipped, {len(skipped)} were skipped")
    gradients = {
        "engine": watched.gradients,
        "single step": gradients_of(single, batches[0]),
        "large batch": gradients_of(one, batches[0]),
    }
    return Trial(outcomes, gradients, watched.counts)


def follow(program: Program, engine: Any, batches: list[Arrays]) -> Outcome:
    """Returns the results of an engine, or a stand-in for one, for batches with leaves `[m*b ...]`."""
    metrics = []
    for rows in batches:
        values = engine.step(put(program, rows))
        metrics.append({name: value.item() for name, value in jax.device_get(values).items()})
    arrays = by_path(nnx.state(engine.state()))
    for name in ("loss", "norm"):  # a variance is ill-conditioned if the mean is large; compare the mean of squares
        square = f"guard/{name}_square/value"
        arrays[square] = arrays[square] + arrays[f"guard/{name}_mean/value"] ** 2
    return Outcome(metrics, arrays)


def put(program: Program, rows: Arrays) -> Batch:
    """Brings a batch, leaves `[m*b ...]`, to the devices of a program, leaves `[m b ...]`."""
    spec = program.batch_spec()
    return {name: jax.device_put(leaf, spec[name].sharding) for name, leaf in program.cut(rows).items()}


def gradients_of(program: Program, rows: Arrays) -> Arrays:
    """Returns the gradients of the initial weights by `collect` of a step, compiled on its own, by path."""
    graph, state = nnx.split(jax.jit(program.make_state)())
    collect: Callable[..., Any] = jax.jit(
        lambda state, batch: program.functions.collect(nnx.merge(graph, state), batch)
    )
    return _gradients(collect(state, put(program, rows)))


def _gradients(sums: Sums) -> Arrays:
    """Returns gradients per target, by path."""
    parts, grads = jax.device_get(sums)
    return {path: leaf / parts.targets for path, leaf in by_path(grads).items()}


def trial_batch(program: Program, *, seed: int) -> Arrays:
    """Returns a batch of random tokens, leaves `[m*b ...]`; the second microbatch, if there is one, has no target."""
    cut, sequence, draw = program.cut, program.config.batch.sequence, np.random.default_rng(seed)
    rows = cut.microbatches * cut.rows
    tokens = draw.integers(0, program.tokenizer.size, (rows, sequence + 1)).astype(np.int32)
    real = draw.integers(1, sequence + 1, (rows, 1))
    places = np.arange(sequence, dtype=np.int32)
    mask = (places < real) & (draw.random((rows, sequence)) < 0.8)
    if cut.microbatches > 1:
        mask[cut.rows : 2 * cut.rows] = False
    if seed == SPIKE:
        mask[:] = False
        mask[0, 0] = True
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(places, (rows, 1)),
        "segment_ids": (places < real).astype(np.int32),
        "mask": mask,
        "rows": np.arange(rows, dtype=np.int32),
    }


def by_path(tree: Any) -> Arrays:
    """Returns the arrays of a tree, on the host, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}


def worst(got: Mapping[str, Any], want: Mapping[str, Any]) -> Worst:
    """Returns the largest difference between two trees of numbers; a path that one lacks differs infinitely."""
    if alone := sorted(got.keys() ^ want.keys()):
        return Worst(f"{alone[0]}: only in {'the engine' if alone[0] in got else 'the other'}", float("inf"))
    return max((Worst(path, _error(got[path], want[path])) for path in want), key=lambda found: found.error)


def _error(got: Any, want: Any) -> float:
    ours, theirs = (np.asarray(value, np.float64) for value in (got, want))
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    distance = float(np.abs(ours - theirs).max(initial=0))
    largest = float(np.abs(theirs).max(initial=0))
    return distance / largest if largest else distance


def _started(engine: Engine) -> Engine:
    engine.initialise()
    return engine
