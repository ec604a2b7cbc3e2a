"""`python tools/kill_test.py CONFIG.yml [rounds=10] [seed=0] [key=val ...]`: kills runs; nothing may be lost.

A reference run is not interrupted. In each round the same run is started, killed with SIGKILL at a random moment
between its first step and its end, and started again until it is done. Its loss curve and its final weights must be
bitwise equal to those of the reference. Exits 0 only if that holds in every round.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.errors import ConfigError, UserError  # noqa: E402
from tools.words import split_words  # noqa: E402

DEFAULTS = ("checkpoint.every_steps=5", "log.tensorboard=false")  # overridden by the words given
CURVE = ("step", "loss", "grad_norm", "learning_rate", "targets", "tokens", "epoch")
PATIENCE_S = 600


class Kill(NamedTuple):
    """One SIGKILL: rows on disk at that moment, and whether a checkpoint was being written."""

    step: int
    in_save: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rounds and prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/kill_test.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG.yml")
    parser.add_argument("words", nargs="*", metavar="key=val", help="rounds=N, seed=S, and keys of the configuration")
    arguments = parse(argv, parser)
    own, rest = split_words(arguments.words, {"rounds": 10, "seed": 0})
    load(arguments.config, rest)
    if own["rounds"] < 1:
        raise ConfigError(f"rounds={own['rounds']} must be at least 1")
    draw = random.Random(own["seed"])
    table = Table("round", "killed at step", "in a save", "curve", "weights")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nnxtrain.train", str(Path(arguments.config).resolve()), *DEFAULTS, *rest]
        command.append(f"output_dir={folder}")
        reference = Path(folder) / "reference"
        seconds = finish([*command, "run_name=reference"], reference)
        print(f"reference: {len(curve(reference))} steps, {seconds:.2f} s from the first to the end")
        held = 0
        for number in range(1, own["rounds"] + 1):
            run = Path(folder) / f"round_{number}"
            kill = kill_once([*command, f"run_name={run.name}"], run, within_s=seconds, draw=draw)
            finish([*command, f"run_name={run.name}"], run)
            same = [_values(curve(run)) == _values(curve(reference)), weights(run) == weights(reference)]
            held += all(same)
            words = [
                str(number),
                str(kill.step),
                "yes" if kill.in_save else "",
                *("equal" if ok else "DIFFERENT" for ok in same),
            ]
            table.add_row(*words)
            print(
                f"round {number}/{own['rounds']}: killed at step {kill.step}, {'equal' if all(same) else 'DIFFERENT'}"
            )
    Console().print(table)
    print(f"{held} of {own['rounds']} rounds equal the run that was not interrupted")
    return 0 if held == own["rounds"] else 1


def kill_once(command: list[str], run: Path, *, within_s: float, draw: random.Random) -> Kill:
    """Starts a run and kills it at most `within_s` after its first step, again if it ended before; returns the kill."""
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
        _wait_for_a_step(process, run)
        time.sleep(draw.uniform(0, within_s))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == -signal.SIGKILL:
            saving = any("orbax-checkpoint-tmp" in path.name for path in (run / "checkpoints").glob("*"))
            return Kill(len(curve(run)), saving)
        if process.returncode != 0:
            raise UserError(f"{run.name} ended by itself with {process.returncode}: {errors.decode().strip()}")
        shutil.rmtree(run)  # it finished before the kill: try again


def finish(command: list[str], run: Path) -> float:
    """Runs a command to its end; returns the seconds from its first step to its end.

    Raises:
        UserError: its exit code was not 0.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    _wait_for_a_step(process, run)
    began = time.monotonic()
    _, errors = process.communicate()
    if process.returncode != 0:
        raise UserError(f"{run.name} ended with {process.returncode}: {errors.decode().strip()}")
    return time.monotonic() - began


def _wait_for_a_step(process: subprocess.Popen[bytes], run: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not curve(run) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def curve(run: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of the training steps of a run."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def weights(run: Path) -> dict[str, bytes]:
    """Returns the bytes of every array of a run's newest checkpoint."""
    import numpy as np

    from nnxtrain.build.program import make_program, on_one_device
    from nnxtrain.checkpoint.store import ARRAYS, CheckpointStore
    from nnxtrain.checkpoint.tree import flat

    config = load(run / "config.yml")
    program = make_program(on_one_device(config))
    state = program.abstract_state()
    store = CheckpointStore(run / "checkpoints", config.checkpoint)
    saved = store.read(store.newest())
    store.restore(saved, state)
    store.close()
    return {
        f"{name}/{'/'.join(path)}": np.asarray(leaf).tobytes()
        for name in ARRAYS
        for path, leaf in flat(state, name).items()
    }


def _values(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in CURVE) for row in rows]


if __name__ == "__main__":
    run(main)
