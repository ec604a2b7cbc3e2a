"""`python benchmarks/dispatch.py [layers=4,16,64] [stack=unrolled] [calls=60] [report=FILE]`: host time per step.

Layers are tiny, so that a step is little more than its dispatch. The engine is compared with a bare `jax.jit` of the
same step over the same flat arrays: seconds until a call returns, in turn, each step finished before the next. Then the
training loop runs `calls` steps, fetching metrics one step late, and is compared with a plain loop over the bare
function that does the same.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.figures import shown, spread, write_report  # noqa: E402
from nnxtrain.aot.show import print_table  # noqa: E402
from nnxtrain.build.program import Program, make_program  # noqa: E402
from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from nnxtrain.loops.train_loop import run_loop  # noqa: E402
from nnxtrain.types import Batch, Metrics  # noqa: E402
from tools.words import split_words  # noqa: E402

NARROW = (
    "model.embed=8 model.heads=1 model.kv_heads=1 model.mlp=8 model.vocab=128 batch.sequence=8 batch.global_size=1 "
    "model.dtype=float32"
)
FIRST = 20  # first steps of a loop, not measured


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/dispatch.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="name=value", help="layers, stack, calls, report")
    own, rest = split_words(
        parse(argv, parser).words, {"layers": "4,16,64", "stack": "unrolled", "calls": 60, "report": ""}
    )
    if rest or own["calls"] <= FIRST or own["stack"] not in ("scan", "unrolled"):
        raise ConfigError(
            f"calls={own['calls']} {' '.join(rest)}: expected layers, stack=scan|unrolled, calls above {FIRST}, report"
        )
    report = measure_dispatch(layer_counts(own["layers"]), scanned=own["stack"] == "scan", calls=own["calls"])
    print_dispatch(report)
    write_report(report, own["report"])
    return 0


def layer_counts(text: str) -> list[int]:
    """Returns the numbers of `4,16,64`, or none of `none`."""
    try:
        return [] if text == "none" else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"layers={text}: expected numbers such as 4,16,64, or none") from error


def measure_dispatch(counts: Iterable[int], *, scanned: bool = False, calls: int = 60) -> dict[str, Any]:
    """Returns for each number of layers the host time of a call and of a loop step, with the bare function's."""
    return {str(layers): _measure(layers, scanned, calls) for layers in counts}


def _measure(layers: int, scanned: bool, calls: int) -> dict[str, Any]:
    words = [*NARROW.split(), f"model.layers={layers}", f"model.scan_layers={scanned}"]
    config = load(ROOT / "configs" / "tiny.yml", words)
    program = make_program(config, devices=jax.devices()[:1])
    engine = program.make_engine()
    engine.initialise()
    bare, arrays = bare_step(program)
    batch = jax.tree.map(lambda spec: jnp.ones(spec.shape, spec.dtype, device=spec.sharding), program.batch_spec())
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(calls + 1):
        for name, step in (("ours", engine.step), ("bare", bare)):
            began = time.perf_counter()
            metrics = step(batch)
            seconds[name].append(time.perf_counter() - began)
            jax.block_until_ready(metrics)
    ours, plain = seconds["ours"][1:], seconds["bare"][1:]
    records: list[float] = []
    run_loop(
        engine,
        iter([(batch, None)] * calls),
        steps=range(calls),
        record=lambda record: records.append(record.step_time_s),
        between=lambda done: None,
        stops=lambda done: False,
    )
    loop, plain_loop = records[FIRST:], plain_steps(bare, batch, calls)[FIRST:]
    return {
        "arrays": arrays,
        "call_s": spread(ours),
        "bare_call_s": spread(plain),
        "call_ratio": spread([mine / other for mine, other in zip(ours, plain, strict=True)]),
        "loop_step_s": spread(loop),
        "bare_loop_step_s": spread(plain_loop),
        "loop_slowest_s": max(loop),
        "extra_s_per_layer": (spread(loop)["median"] - spread(plain_loop)["median"]) / layers,
    }


def bare_step(program: Program) -> tuple[Callable[[Batch], Metrics], int]:
    """Returns the step under a plain `jax.jit` that donates a flat list of arrays, and the length of the list."""
    graph, state = nnx.split(jax.jit(program.make_state)())
    leaves, tree = jax.tree.flatten(state)

    def train_step(leaves: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], Metrics]:
        state, metrics = program.train_step(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), batch)
        return jax.tree.leaves(nnx.state(state)), metrics

    jitted = jax.jit(train_step, donate_argnums=0)

    def step(batch: Batch) -> Metrics:
        nonlocal leaves
        leaves, metrics = jitted(leaves, batch)
        return metrics

    return step, len(leaves)


def plain_steps(step: Callable[[Batch], Metrics], batch: Batch, calls: int) -> list[float]:
    """Returns the seconds between the ends of steps, fetching metrics one step late."""
    ends = []
    flight = step(batch)
    for _ in range(calls):
        following = step(batch)
        jax.device_get(flight)
        ends.append(time.perf_counter())
        flight = following
    return [end - before for before, end in itertools.pairwise(ends)]


def print_dispatch(report: dict[str, Any]) -> None:
    """Prints one row per number of layers."""
    rows = [
        [
            layers,
            str(row["arrays"]),
            shown(row["call_s"], 1e3),
            shown(row["bare_call_s"], 1e3),
            shown(row["call_ratio"]),
            f"{row['loop_step_s']['median'] * 1e3:.4g} / {row['bare_loop_step_s']['median'] * 1e3:.4g}",
            shown(row["loop_slowest_s"], 1e3),
        ]
        for layers, row in report.items()
    ]
    columns = ["layers", "arrays", "call", "bare call", "ratio", "loop / bare loop", "slowest"]
    print_table(columns, rows, title="host time of a step, ms: median (p10 to p90)")


if __name__ == "__main__":
    run(main)
