"""`python benchmarks/checkpoint.py [rounds=20] [report=FILE] [key=val ...]`: how long a save blocks training.

Alternates steps and asynchronous saves with a state of about 100 MB; prints the seconds until a save returns, of the
whole write, and of a step, each as median, p10 and p90.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
from flax import nnx  # noqa: E402

from benchmarks.figures import spread, write_report  # noqa: E402
from nnxtrain.build.feed import open_data  # noqa: E402
from nnxtrain.build.program import make_program  # noqa: E402
from nnxtrain.checkpoint.store import CheckpointStore  # noqa: E402
from nnxtrain.cli.command import parse, run  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.data.batches import START  # noqa: E402
from nnxtrain.run.banner import checkpoint_meta  # noqa: E402
from tools.words import split_words  # noqa: E402

SIZES = ("model.embed=384", "model.heads=6", "model.kv_heads=6", "model.layers=5", "model.vocab=1024")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/checkpoint.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="key=val", help="rounds=N, report=FILE, keys of the configuration")
    own, rest = split_words(parse(argv, parser).words, {"rounds": 20, "report": ""})
    config = load(ROOT / "configs" / "tiny.yml", [*SIZES, *rest])
    program = make_program(config, devices=jax.devices()[:1])
    data, engine = open_data(program), program.make_engine()
    engine.initialise()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(engine.state())))
    times: dict[str, list[float]] = {"step_s": [], "held_s": [], "written_s": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(CheckpointStore(Path(folder), config.checkpoint, read_only=False)) as store,
    ):
        meta = checkpoint_meta(data)
        batches = data.train.start(START, put=data.put_train, prefetch=2)
        for number in range(own["rounds"] + 1):
            began = time.perf_counter()
            jax.block_until_ready(engine.step(next(batches)[0]))
            stepped = time.perf_counter()
            store.save(number + 1, engine.state(), data={}, meta=meta, loss=None)
            returned = time.perf_counter()
            store.wait()
            if number:  # the first save starts orbax's threads
                for name, seconds in zip(
                    times, (stepped - began, returned - stepped, time.perf_counter() - stepped), strict=True
                ):
                    times[name].append(seconds)
        batches.close()
    report = {"state_bytes": size, "rounds": own["rounds"]} | {name: spread(values) for name, values in times.items()}
    print(json.dumps(report, indent=2))
    write_report(report, own["report"])
    return 0


if __name__ == "__main__":
    run(main)
