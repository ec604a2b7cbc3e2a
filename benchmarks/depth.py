"""`python benchmarks/depth.py [rounds=5] [report=FILE] [key=val ...]`: what depth costs when layers are scanned.

Lowers and compiles the step with 4 and with 64 layers in turn; prints the seconds of each and the ratio of both in each
round, as median, p10 and p90, and the instructions of the lowered programs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.checkpoint import spread  # noqa: E402
from nnxtrain.build import make_program  # noqa: E402
from nnxtrain.config.command import guarded, parse  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.config.schema import Config  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from tools.words import split_words  # noqa: E402

SHALLOW, DEEP = 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/depth.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="key=val", help="rounds=N, report=FILE, keys of the configuration")
    own, rest = split_words(parse(argv, parser).words, {"rounds": 5, "report": ""})
    if own["rounds"] < 1:
        raise ConfigError(f"rounds={own['rounds']} must be at least 1")
    times: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
    instructions = {}
    for number in range(own["rounds"] + 1):
        for layers, seconds in times.items():
            config = load(ROOT / "configs" / "tiny.yml", ["mesh.data=1", *rest, f"model.layers={layers}"])
            took, instructions[layers] = compile_once(config)
            if number:  # the first round imports and warms up
                seconds.append(took)
    ratios = np.array(times[DEEP]) / np.array(times[SHALLOW])
    report = {
        "rounds": own["rounds"],
        "compile_s": {str(layers): spread(seconds) for layers, seconds in times.items()},
        "ratio": spread(list(ratios)),
        "instructions": {str(layers): count for layers, count in instructions.items()},
    }
    print(json.dumps(report, indent=2))
    if own["report"]:
        Path(own["report"]).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def compile_once(config: Config) -> tuple[float, int]:
    """Returns the seconds that lowering and compiling the step take, and the instructions of the lowered program."""
    program = make_program(config, devices=jax.devices()[:1])
    graph, state = nnx.split(program.abstract_state())

    def step(state: nnx.State, batch: Any) -> Any:
        after, metrics = program.train_step(nnx.merge(graph, state), batch)
        return nnx.state(after), metrics

    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, program.batch_spec())
    lowered.compile()
    return time.perf_counter() - began, len(lowered.as_text().splitlines())


if __name__ == "__main__":
    sys.exit(guarded(main))
