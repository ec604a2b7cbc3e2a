"""`python benchmarks/depth.py [layers=4,64] [rounds=7] [report=FILE] [key=val ...]`: compile time against depth.

Compiles the training step with scanned layers of size S, shallow and deep in turn, without a compilation cache; nothing
is run. Prints the seconds to trace, lower and compile, and the ratio of deep to shallow per round.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402

from benchmarks.dispatch import layer_counts  # noqa: E402
from benchmarks.figures import shown, spread, write_report  # noqa: E402
from benchmarks.steps import SIZES  # noqa: E402
from nnxtrain.aot.show import print_table  # noqa: E402
from nnxtrain.build.program import make_program  # noqa: E402
from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from tools.words import split_words  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/depth.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "words", nargs="*", metavar="name=value", help="layers, rounds, report, keys of the configuration"
    )
    own, rest = split_words(parse(argv, parser).words, {"layers": "4,64", "rounds": 7, "report": ""})
    depths = layer_counts(own["layers"])
    if len(depths) != 2 or own["rounds"] < 1:
        raise ConfigError(f"layers={own['layers']} rounds={own['rounds']}: expected two depths and 1 or more rounds")
    seconds: dict[int, list[float]] = {layers: [] for layers in depths}
    for number in range(own["rounds"] + 1):
        for layers in depths:
            words = [*SIZES["S"].split(), "model.scan_layers=true", *rest, f"model.layers={layers}"]
            config = load(ROOT / "configs" / "tiny.yml", words)
            compile_s = make_program(config, devices=jax.devices()[:1]).make_engine().compile_s
            if number:  # the first round fills jax's in-memory caches
                seconds[layers].append(compile_s)
    shallow, deep = depths
    report: dict[str, Any] = {
        "rounds": own["rounds"],
        "compile_s": {str(layers): spread(values) for layers, values in seconds.items()},
        "ratio": spread([high / low for low, high in zip(seconds[shallow], seconds[deep], strict=True)]),
    }
    rows = [[str(layers), shown(spread(values))] for layers, values in seconds.items()]
    rows.append([f"{deep} / {shallow}", shown(report["ratio"])])
    title = f"compile time of scanned layers, s, {own['rounds']} rounds"
    print_table(["layers", "median (p10 to p90)"], rows, title=title)
    write_report(report, own["report"])
    return 0


if __name__ == "__main__":
    run(main)
