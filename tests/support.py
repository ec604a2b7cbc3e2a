"""What tests share: small configurations, batches, comparisons, and runs in a process of their own."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from nnxtrain.build.program import Program, make_program
from nnxtrain.checkpoint.stacking import scanned, unrolled
from nnxtrain.checkpoint.tree import flat
from nnxtrain.config.load import load
from nnxtrain.engine.base import Engine

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.yml"
UNEVEN = (31, 3, 17, 1, 32, 2, 9, 5)  # targets of each row: 100 together


def tiny(*words: str):
    """Returns the configuration of `tiny.yml` with `words` on top."""
    return load(TINY, words)


def tiny_program(*words: str, devices: int = 1) -> Program:
    """Returns the program of `tiny.yml` with `words` on top, on the first `devices`."""
    return make_program(tiny(*words), devices=jax.devices()[:devices])


@functools.cache
def _compiled(*words: str, devices: int) -> tuple[Program, Engine]:
    program = tiny_program(*words, devices=devices)
    return program, program.make_engine()


def started(*words: str, devices: int = 1) -> Engine:
    """Returns an engine of its own with its initial state; its programs are compiled once a process for the same words.

    For tests of numbers: one that counts compiles has to make them, by `tiny_program(...).make_engine()`.
    """
    program, first = _compiled(*words, devices=devices)
    engine = program.new_engine()
    engine.use(first._compiled, program.batch_spec(), hlo_hash=first.hlo_hash)
    engine._initial = first._initial  # the draw of the state is compiled once, too
    engine.initialise()
    return engine


def random_batch(
    *, accum_steps: int = 1, targets: tuple[int, ...] = UNEVEN, sequence: int = 32, vocab: int = 256, seed: int = 0
):
    """Returns a batch of random tokens, leaves `[m b ...]`; row `i` has `targets[i]` targets."""
    rows = len(targets)
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, sequence + 1)).astype(np.int32)
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
        "segment_ids": np.ones((rows, sequence), np.int32),
        "mask": np.arange(sequence) < np.array(targets)[:, None],
        "rows": np.arange(rows, dtype=np.int32),
    }
    return {name: leaf.reshape(accum_steps, rows // accum_steps, *leaf.shape[1:]) for name, leaf in batch.items()}


def initial_state(program: Program):
    """Returns the initial state of a program, compiled: drawn operation by operation it takes many times as long."""
    return jax.jit(program.make_state)()


def pure_step(program: Program):
    """Returns the state of a program taken apart, and its step as `(state, batch) -> metrics`."""
    graph, state = nnx.split(initial_state(program))
    return state, lambda state, batch: program.train_step(nnx.merge(graph, state), batch)[1]


def weights(state) -> dict[str, np.ndarray]:
    """Returns the weights of a state by path, all layers stacked; see `stacked`."""
    return stacked(flat(state, "model"))


def stacked(tree) -> dict[str, np.ndarray]:
    """Returns arrays by path with all layers stacked, whether they were scanned, scanned in groups, or unrolled."""
    arrays = {path: np.asarray(leaf) for path, leaf in tree.items()}
    joined = scanned(unrolled(arrays, lambda leaf, index: leaf[index]), np.stack, period=1)
    return {"/".join(path): leaf for path, leaf in sorted(joined.items())}


def assert_trees_close(got, want, *, rtol: float) -> None:
    """Asserts that each leaf differs by at most `rtol` times the largest value of the wanted leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = np.max(np.abs(one - other), initial=0)
        bound = rtol * max(np.max(np.abs(other), initial=0), 1e-30)
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: {worst} > {bound}"


def assert_trees_equal(got, want) -> None:
    """Asserts that each leaf has the same bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), jax.tree_util.keystr(path)


def run_module(module: str, *words: str, devices: int = 1, cwd: Path = ROOT, **environment: str):
    """Runs `python -m nnxtrain.MODULE WORDS` in a process of its own; returns what `subprocess.run` does.

    It compiles as the tests do: quickly, except among the slow ones.
    """
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    if devices == 1 and (compiled := jax.config.values["jax_compilation_cache_dir"]):
        env |= {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env |= environment
    command = [sys.executable, "-m", f"nnxtrain.{module}", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300)


def rows_of(folder: Path, kind: str = "train") -> list[dict]:
    """Returns the rows of a run's `metrics.jsonl` of one kind."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
