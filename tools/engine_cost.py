"""Cost of the split engine and the single step: time of a cycle, host time, memory, traces."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.profiler import ProfileOptions

from benchmarks.figures import spread
from nnxtrain.aot.cost import memory_of
from nnxtrain.build.program import Program
from nnxtrain.engine.base import Engine
from nnxtrain.profiling.trace import Digest, digest_of, trace_files
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.sharding.audit import bytes_per_device
from nnxtrain.types import Batch


class Side(NamedTuple):
    """One of the two engines that are compared, with its program and its own state."""

    program: Program
    engine: Engine


def make_side(program: Program) -> Side:
    """Returns a side, compiled and with its initial state."""
    engine = program.make_engine()
    engine.initialise()
    return Side(program, engine)


def batch_of(program: Program) -> Batch:
    """Returns a batch of ones, leaves `[m b ...]`, on the devices; every token counts."""
    return {name: jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding) for name, leaf in program.batch_spec().items()}


def cycle(engine: Engine, batch: Batch) -> tuple[float, float]:
    """Runs a step and waits for it; returns the seconds until it was dispatched, and until it was finished."""
    began = time.perf_counter()
    metrics = engine.step(batch)
    started = time.perf_counter()
    jax.block_until_ready((metrics, engine.state()))
    return started - began, time.perf_counter() - began


def measure(sides: dict[str, Side], iterations: int, *, compiles: CompileLog) -> dict[str, Any]:
    """Returns figures of both sides, which run cycles in turn, A B A B, after a warm-up cycle each.

    Args:
        sides: by name, `baseline` and `engine`.
        iterations: timed cycles per side.
        compiles: log of compilations, started before the sides were made.
    """
    batches = {name: batch_of(side.program) for name, side in sides.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(iterations + 1):
        for name, side in sides.items():
            seconds = cycle(side.engine, batches[name])
            if number:
                taken[name].append(seconds)
    figures: dict[str, Any] = {name: _figures(side, taken[name]) for name, side in sides.items()}
    pairs = zip(taken["engine"], taken["baseline"], strict=True)
    for name, side in sides.items():
        figures[name]["compiles"] = compiles.of(side.engine.memory())
    figures["ratio"] = spread([mine / other for (_, mine), (_, other) in pairs])
    figures["peak_ratio"] = figures["engine"]["peak_bytes"] / figures["baseline"]["peak_bytes"]
    return figures


def _figures(side: Side, taken: list[tuple[float, float]]) -> dict[str, Any]:
    batch = side.program.config.batch
    tokens = batch.global_size * batch.sequence
    return {
        "cycle_s": spread([whole for _, whole in taken]),
        "dispatch_s": spread([started for started, _ in taken]),
        "device_s": spread([whole - started for started, whole in taken]),
        "tokens_per_s": spread([tokens / whole for _, whole in taken]),
        "compile_s": side.engine.compile_s,
        "peak_bytes": peak_bytes(side),
    }


def peak_bytes(side: Side) -> int:
    """Returns the peak bytes of a device: state, accumulated sums, and what a program needs beside them."""
    resident = bytes_per_device((nnx.state(side.program.abstract_state()), side.program.batch_spec()))
    resident += side.engine.resident_bytes()
    return max(memory_of(stats, resident=resident).peak for stats in side.engine.memory().values())


def trace(sides: dict[str, Side], iterations: int, folder: Path) -> Digest:
    """Runs `iterations` more cycles of each side under the profiler; returns the figures of the trace.

    Timed cycles are not traced: tracing slows both sides, not equally.
    """
    batches = {name: batch_of(side.program) for name, side in sides.items()}
    options = ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for name, side in sides.items():
            for number in range(iterations):
                with jax.profiler.StepTraceAnnotation("train", step_num=number):
                    cycle(side.engine, batches[name])
    return digest_of(trace_files(folder)[-1])
