"""`python benchmarks/steps.py size=S|M against=floor [stack=both] [pairs=30] [layers=4,16,64] [report=FILE]`.

Compares the step time with that of a handwritten decoder (`benchmarks/floor.py`): both run the same batches in turn in
one process, A B A B, from the same weights; a matrix product is timed after each pair, as the peak rate for `mfu`.
`stack=scan|unrolled|both` says how layers are compiled on both sides. Then, for each of `layers`, the host time of a
step with unrolled layers (`benchmarks/dispatch.py`); `layers=none` skips that.
"""

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks import floor  # noqa: E402
from benchmarks.dispatch import layer_counts, measure_dispatch, print_dispatch  # noqa: E402
from benchmarks.figures import shown, spread, write_report  # noqa: E402
from nnxtrain.aot.cost import memory_of as compiled_memory  # noqa: E402
from nnxtrain.aot.show import print_table  # noqa: E402
from nnxtrain.build.feed import open_data  # noqa: E402
from nnxtrain.build.program import Program, make_program  # noqa: E402
from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.config.schema import Config  # noqa: E402
from nnxtrain.data.batches import START  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from nnxtrain.state import TrainStateNNX  # noqa: E402
from nnxtrain.types import Batch, Metrics  # noqa: E402
from tools.words import split_words  # noqa: E402

SIZES = {
    "S": "model.vocab=8192 model.embed=256 model.layers=8 model.heads=8 model.kv_heads=4 model.head_dim=32 "
    "model.mlp=704 batch.sequence=256 batch.global_size=8",
    "M": "model.vocab=32768 model.embed=512 model.layers=12 model.heads=8 model.kv_heads=4 model.head_dim=64 "
    "model.mlp=1408 batch.sequence=512 batch.global_size=4",
    "tiny": "model.layers=1 model.embed=16 batch.sequence=16",  # to try the benchmark itself
}
STACKS = {"scan": ("scan",), "unrolled": ("unrolled",), "both": ("scan", "unrolled")}
WARM_UP = "model.dtype=float32 steps=1000 schedule.warmup_steps=10"
SIDE = 2048  # of the square matrices with which the machine's matmul rate is measured
MIB = 1 / 2**20


class Side(NamedTuple):
    """One of the two sides of the comparison.

    Attributes:
        step: takes the result of `own`; returns metrics while the step is still running.
        own: converts a batch with leaves `[1 b ...]` to a batch of this side.
        weights: returns the current weights in the form of the handwritten decoder.
        compile_s: seconds to trace, lower and compile the step.
        memory: `CompiledMemoryStats` of the step.
    """

    step: Callable[[Batch], Metrics]
    own: Callable[[Batch], Batch]
    weights: Callable[[], floor.Weights]
    compile_s: float
    memory: Any


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/steps.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="name=value", help="size, against, stack, pairs, layers, report")
    defaults = {"size": "S", "against": "floor", "stack": "both", "pairs": 30, "layers": "4,16,64", "report": ""}
    own, rest = split_words(parse(argv, parser).words, defaults)
    for name, choices in (("size", SIZES), ("against", {"floor"}), ("stack", STACKS)):
        if own[name] not in choices:
            raise ConfigError(f"{name}={own[name]} is not one of {', '.join(sorted(choices))}")
    if rest or own["pairs"] < 1:
        raise ConfigError(
            f"pairs={own['pairs']} {' '.join(rest)}: expected size, against, stack, pairs of 1 or more, layers, report"
        )
    counts = layer_counts(own["layers"])
    report: dict[str, Any] = {"machine": machine(), "size": own["size"], "pairs": own["pairs"], "stacks": {}}
    for stack in STACKS[own["stack"]]:
        report["stacks"][stack] = compare(config_of(own["size"], stack), own["pairs"])
        print_steps(f"size {own['size']}, {stack}, {own['pairs']} pairs", report["stacks"][stack])
    if counts:
        report["dispatch"] = measure_dispatch(counts)
        print_dispatch(report["dispatch"])
    write_report(report, own["report"])
    return 0


def machine() -> dict[str, Any]:
    """Returns the device, cores and versions of the measurement."""
    kind = jax.devices()[0].device_kind
    return {"device": kind, "cores": os.cpu_count(), "python": platform.python_version(), "jax": jax.__version__}


def config_of(size: str, stack: str) -> Config:
    """Returns the configuration of a size, with scanned or unrolled layers."""
    scanned = f"model.scan_layers={stack == 'scan'}"
    return load(ROOT / "configs" / "tiny.yml", [*SIZES[size].split(), *WARM_UP.split(), scanned])


def compare(config: Config, pairs: int) -> dict[str, Any]:
    """Returns the figures of both sides, and the ratio of their step times per pair."""
    program = make_program(config, devices=jax.devices()[:1])
    engine = program.make_engine()
    engine.initialise()

    def weights() -> floor.Weights:
        return floor_weights(engine.state())

    sides = {
        "ours": Side(engine.step, lambda batch: batch, weights, engine.compile_s, *engine.memory().values()),
        "floor": floor_side(config, weights()),
    }
    calls, steps, rates = alternate(sides, batches_of(program, pairs + 1))
    tokens = config.batch.global_size * config.batch.sequence
    work = program.flops_per_token * tokens
    figures: dict[str, Any] = {
        name: {
            "step_s": spread(steps[name]),
            "tokens_per_s": spread([tokens / seconds for seconds in steps[name]]),
            "mfu": spread([work / seconds / rate for seconds, rate in zip(steps[name], rates, strict=True)]),
            "dispatch_s": spread(calls[name]),
            "compile_s": side.compile_s,
            **memory_of(side),
        }
        for name, side in sides.items()
    }
    ratios = [mine / other for mine, other in zip(steps["ours"], steps["floor"], strict=True)]
    return figures | {"ratio": spread(ratios), "matmul_flops": spread(rates)}


def alternate(
    sides: dict[str, Side], batches: Iterable[Batch]
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Runs each batch on both sides in turn; the first is a warm-up, and checks that both compute the same loss.

    Returns: seconds of each call by side, seconds of each step by side, and the matmul FLOP/s measured after each.
    """
    calls: dict[str, list[float]] = {name: [] for name in sides}
    steps: dict[str, list[float]] = {name: [] for name in sides}
    rates = []
    multiply = jax.jit(jnp.dot)
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    for number, batch in enumerate(batches):
        losses = []
        for name, side in sides.items():
            own = jax.block_until_ready(side.own(batch))
            began = time.perf_counter()
            metrics = side.step(own)
            calls[name].append(time.perf_counter() - began)
            losses.append(float(metrics["loss"]))
            steps[name].append(time.perf_counter() - began)
        if number == 0 and abs(losses[0] - losses[1]) > 1e-5 * losses[0]:
            raise RuntimeError(f"the two are not the same model: their losses are {losses}")
        began = time.perf_counter()
        jax.block_until_ready(multiply(matrix, matrix))
        rates.append(2 * SIDE**3 / (time.perf_counter() - began))
    calls, steps = ({name: values[1:] for name, values in taken.items()} for taken in (calls, steps))
    return calls, steps, rates[1:]


def batches_of(program: Program, count: int) -> list[Batch]:
    """Returns the first batches of the data, on the device."""
    data = open_data(program)
    batches = data.train.start(START, put=data.put_train, prefetch=2)
    taken = [batch for batch, _ in itertools.islice(batches, count)]
    batches.close()
    return taken


def floor_weights(state: TrainStateNNX) -> floor.Weights:
    """Returns a copy of the weights in the form of the handwritten decoder."""
    weights: floor.Weights = {}
    layers: dict[int, floor.Weights] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(state.model, nnx.Param)):
        numbers = [part for part in path if isinstance(part, int)]
        if numbers:
            place = layers.setdefault(numbers[0], {})
        else:
            place = weights.setdefault("layers", {}) if path[0] == "stack" else weights
        place[path[-2]] = leaf[...].copy()
    return weights | ({"layers": [layers[number] for number in sorted(layers)]} if layers else {})


def floor_side(config: Config, weights: floor.Weights) -> Side:
    """Returns the handwritten step, compiled, with its own state."""
    rates, rule = config.schedule, config.optimizer
    peak = rule.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        peak / (rates.warmup_steps + 1), peak, rates.warmup_steps, config.steps - 1, peak * rates.final_fraction
    )
    optimizer = floor.make_optimizer(
        schedule, b1=rule.b1, b2=rule.b2, eps=rule.eps, weight_decay=rule.weight_decay, clip_norm=rule.clip_norm
    )
    model = floor.Model(config.model.norm_eps, config.model.rope_theta, config.loss_chunks)
    state = floor.State(weights, optimizer.init(weights))
    tokens = jax.ShapeDtypeStruct((config.batch.global_size, config.batch.sequence), jnp.int32)
    names = ("inputs", "targets", "positions", "segment_ids")
    shapes = dict.fromkeys(names, tokens) | {"mask": jax.ShapeDtypeStruct(tokens.shape, bool)}
    began = time.monotonic()
    compiled = floor.make_step(model, optimizer).lower(state, shapes).compile()
    compile_s = time.monotonic() - began

    def step(batch: Batch) -> Metrics:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    def own(batch: Batch) -> Batch:
        return {name: batch[name][0] for name in shapes}

    return Side(step, own, lambda: state.weights, compile_s, compiled.memory_analysis())


def memory_of(side: Side) -> dict[str, int]:
    """Returns the bytes of arguments, temporaries and peak of a step."""
    found = compiled_memory(side.memory, resident=0)
    return {"argument_bytes": found.arguments, "temp_bytes": found.temporaries, "peak_bytes": found.peak}


def print_steps(title: str, figures: dict[str, Any]) -> None:
    """Prints the figures of both sides, one column each."""
    lines = (
        ("step, ms", "step_s", 1e3),
        ("tokens/s", "tokens_per_s", 1),
        ("share of the matmul rate, %", "mfu", 100),
        ("host dispatch, ms", "dispatch_s", 1e3),
        ("compile, s", "compile_s", 1),
        ("temporaries, MiB", "temp_bytes", MIB),
        ("peak, MiB", "peak_bytes", MIB),
    )
    sides = ("ours", "floor")
    rows = [[label, *(shown(figures[side][name], scale) for side in sides)] for label, name, scale in lines]
    rows.append(["ratio of step times", shown(figures["ratio"]), ""])
    rows.append([f"matmul {SIDE}, GFLOP/s", shown(figures["matmul_flops"], 1e-9), ""])
    print_table(["", *sides], rows, title=f"{title}: median (p10 to p90)")


if __name__ == "__main__":
    run(main)
