"""`python benchmarks/annotations.py [steps=2000] [rounds=21] [report=FILE]`: the price of traces that are not taken.

Takes steps of an engine that does nothing, in turn as the loop is and without what is there for traces: its
annotations, and the look for a window between two steps. Prints microseconds a step of both, and of the difference, as
median, p10 and p90 over the rounds.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import numpy as np  # noqa: E402
from jax.profiler import TraceAnnotation  # noqa: E402

from nnxtrain.config.command import parse, run  # noqa: E402
from nnxtrain.config.profile import ProfileConfig  # noqa: E402
from nnxtrain.loop import run_loop  # noqa: E402
from nnxtrain.profiling.profiler import Profiler  # noqa: E402
from nnxtrain.profiling.session import Place  # noqa: E402
from tools.words import split_words  # noqa: E402

NOTHING = contextlib.nullcontext()


class Engine:
    """Does nothing, under the annotation of an engine."""

    def step(self, batch: None) -> dict[str, np.float32]:
        """Returns a metric that needs no fetching."""
        with TraceAnnotation("baseline_cycle"):
            return {"loss": np.float32(0)}


class BareEngine:
    """Does nothing."""

    def step(self, batch: None) -> dict[str, np.float32]:
        """Returns a metric that needs no fetching."""
        return {"loss": np.float32(0)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/annotations.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="key=val", help="steps=N, rounds=N, report=FILE")
    own, rest = split_words(parse(argv, parser).words, {"steps": 2000, "rounds": 21, "report": ""})
    if rest:
        parser.error(f"unknown word {rest[0]}")
    times: dict[str, list[float]] = {"with_us": [], "without_us": [], "price_us": []}
    for number in range(own["rounds"] + 1):
        with_us, without_us = annotated(own["steps"]), bare(own["steps"])
        if number:  # the first round fills caches
            for name, value in zip(times, (with_us, without_us, with_us - without_us), strict=True):
                times[name].append(value)
    report = {"steps": own["steps"], "rounds": own["rounds"]} | {name: spread(values) for name, values in times.items()}
    print(json.dumps(report, indent=2))
    if own["report"]:
        Path(own["report"]).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def annotated(steps: int) -> float:
    """Returns microseconds a step of the loop as it is."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(
            ProfileConfig(enabled=True, skip_first=2**30),
            Place(Path(folder) / "profile"),
            drain=lambda: None,
            say=print,
            alive=lambda: None,
        )
        with profiler.steps(0):
            return timed(Engine(), steps, lambda done: profiler.turns() or None)  # no window comes so soon


def bare(steps: int) -> float:
    """Returns microseconds a step of the loop without annotations and without a look for windows."""

    def nothing(name: str, **values: int) -> contextlib.nullcontext[None]:
        return NOTHING

    with patch.multiple("nnxtrain.loop", StepTraceAnnotation=nothing, TraceAnnotation=nothing):
        return timed(BareEngine(), steps, lambda done: None)


def timed(engine: Engine | BareEngine, steps: int, between: Callable[[int], None]) -> float:
    """Returns microseconds a step."""
    batches = iter([({}, None)] * steps)
    began = time.perf_counter()
    run_loop(engine, batches, steps=range(steps), record=lambda record: None, between=between, stops=lambda done: False)
    return (time.perf_counter() - began) / steps * 1e6


def spread(values: list[float]) -> dict[str, float]:
    """Returns median, p10 and p90."""
    return {name: float(np.percentile(values, share)) for name, share in (("median", 50), ("p10", 10), ("p90", 90))}


if __name__ == "__main__":
    run(main)
