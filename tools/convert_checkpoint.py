"""`python tools/convert_checkpoint.py RUN_DIR OUTPUT_DIR layout=scanned|unrolled [step=N]`: converts layers.

The output is a run directory that trains, evaluates and generates like the original, with bitwise equal weights.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from nnxtrain.cli.command import note, parse, run  # noqa: E402
from nnxtrain.config.echo import echo  # noqa: E402
from nnxtrain.config.load import load  # noqa: E402
from nnxtrain.config.record import to_yaml  # noqa: E402
from nnxtrain.errors import ConfigError  # noqa: E402
from nnxtrain.host.files import write_whole  # noqa: E402
from tools.words import split_words  # noqa: E402

LAYOUTS = {"scanned": "true", "unrolled": "false"}


def main(argv: Sequence[str] | None = None) -> int:
    """Converts one checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/convert_checkpoint.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("output", metavar="OUTPUT_DIR", type=Path)
    parser.add_argument(
        "words", nargs="*", metavar="key=val", help="layout=scanned or unrolled; step=N, default the newest"
    )
    arguments = parse(argv, parser)
    own, rest = split_words(arguments.words, {"layout": "", "step": -1})
    if rest or own["layout"] not in LAYOUTS:
        raise ConfigError(f"expected layout=scanned or layout=unrolled, got '{echo(' '.join(rest) or own['layout'])}'")
    if not (arguments.run / "config.yml").is_file():
        raise ConfigError(f"{arguments.run} is not a run directory: it contains no config.yml")
    if arguments.output.exists():
        raise ConfigError(f"{arguments.output} exists; choose another folder")
    step = convert(arguments.run, arguments.output, layout=own["layout"], step=own["step"])
    print(f"{arguments.output}: step {step}, {own['layout']}")
    return 0


def convert(run: Path, output: Path, *, layout: str, step: int) -> int:
    """Writes the checkpoint of `step`, or the newest for -1, in another layout; returns its step."""
    from nnxtrain.build.program import make_program, on_one_device
    from nnxtrain.checkpoint.store import CheckpointStore
    from nnxtrain.config.record import as_mapping

    place = [f"output_dir={output.resolve().parent}", f"run_name={output.name}"]
    config = load(run / "config.yml", [f"model.scan_layers={LAYOUTS[layout]}", *place], say=note)
    program = make_program(on_one_device(config))
    state = program.abstract_state()
    with closing(CheckpointStore(run / "checkpoints", config.checkpoint)) as source:
        saved = source.read(source.newest() if step < 0 else step)
        source.restore(saved, state)
    meta = {name: saved.meta[name] for name in ("versions", "tokenizer", "mesh", "corpus")} | {
        "config": as_mapping(config)
    }
    with closing(CheckpointStore(output / "checkpoints", config.checkpoint, read_only=False)) as target:
        target.save(saved.step, state, data=saved.data, meta=meta, loss=None)
        target.wait()
    write_whole(output / "config.yml", to_yaml(config))
    return saved.step


if __name__ == "__main__":
    run(main)
