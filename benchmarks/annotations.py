"""`python benchmarks/annotations.py [steps=2000] [rounds=21] [report=FILE]`: cost of profiling without a trace.

Runs the annotations of a step and the check for a window, in turn with an empty loop. Prints microseconds per step of
both, and of the difference, as median, p10 and p90 over the rounds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from jax.profiler import StepTraceAnnotation, TraceAnnotation  # noqa: E402

from benchmarks.figures import spread, write_report  # noqa: E402
from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.profile import ProfileConfig  # noqa: E402
from nnxtrain.profiling.profiler import Profiler  # noqa: E402
from nnxtrain.profiling.session import Place  # noqa: E402
from tools.words import split_words  # noqa: E402

NAMES = ("data_wait", "baseline_cycle", "metrics_wait", "log")  # each once per step, inside `train`


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/annotations.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="key=val", help="steps=N, rounds=N, report=FILE")
    own, rest = split_words(parse(argv, parser).words, {"steps": 2000, "rounds": 21, "report": ""})
    if rest:
        parser.error(f"unknown word {rest[0]}")
    times: dict[str, list[float]] = {"with_us": [], "without_us": [], "price_us": []}
    for number in range(own["rounds"] + 1):
        with_us, without_us = annotated(own["steps"]), timed(lambda step: None, own["steps"])
        if number:  # the first round fills caches
            for name, value in zip(times, (with_us, without_us, with_us - without_us), strict=True):
                times[name].append(value)
    report = {"steps": own["steps"], "rounds": own["rounds"]} | {name: spread(values) for name, values in times.items()}
    print(json.dumps(report, indent=2))
    write_report(report, own["report"])
    return 0


def annotated(steps: int) -> float:
    """Returns microseconds per step of annotations and checks."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(
            ProfileConfig(enabled=True, skip_first=2**30),
            Place(Path(folder) / "profile"),
            drain=lambda: None,
            say=print,
            alive=lambda: None,
        )

        def step(number: int) -> None:
            with StepTraceAnnotation("train", step_num=number):
                for name in NAMES:
                    with TraceAnnotation(name, step_num=number):
                        pass
            profiler.turns()  # no window is due

        with profiler.steps(0):
            return timed(step, steps)


def timed(step: Callable[[int], None], steps: int) -> float:
    """Returns microseconds per call of `step`."""
    began = time.perf_counter()
    for number in range(steps):
        step(number)
    return (time.perf_counter() - began) / steps * 1e6


if __name__ == "__main__":
    run(main)
