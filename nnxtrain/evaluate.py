"""`python -m nnxtrain.evaluate RUN_DIR|CONFIG.yml [key=val ...]`: the loss on the held-out sets."""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from nnxtrain.cli.command import make_parser, note, parse, run, traced
from nnxtrain.cli.unread import unread_words
from nnxtrain.config.load import load
from nnxtrain.config.record import recorded
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError
from nnxtrain.host.platform import choose_platform

if TYPE_CHECKING:
    from nnxtrain.build.registry import Registry

EPILOG = """\
example:
  python -m nnxtrain.evaluate runs/quickstart eval.max_batches=null

Prints one JSON object per held-out set. Nothing in the run directory changes.
"""


def main(argv: Sequence[str] | None = None, *, registry: "Registry | None" = None) -> int:
    """Runs the command line; returns the exit code. `registry` contains entries from outside the package."""
    parser = make_parser("evaluate", "Evaluates the newest weights of a run on every held-out set.", epilog=EPILOG)
    parser.add_argument("run", metavar="RUN_DIR|CONFIG.yml", help="run directory, or the configuration file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=val", help="keys that override those of the run")
    arguments = parse(argv, parser)
    place, is_run = Path(arguments.run), os.path.isdir(arguments.run)  # Path.is_dir fails if a name is too long
    file = place / "config.yml" if is_run else place
    config = load(file, arguments.overrides, extra=registry.names() if registry else None, say=note)
    where = () if is_run else ("output_dir=", "run_name=")  # these find the run of a configuration
    for line in unread_words(
        [word for word in arguments.overrides if not word.startswith(where)],
        config,
        recorded(file),
        command="evaluate",
    ):
        note(line)
    folder = place if is_run else Path(config.output_dir).expanduser() / str(config.run_name)
    choose_platform(config)
    with traced(config):
        return evaluate_run(config, folder, registry)


def evaluate_run(config: Config, folder: Path, registry: "Registry | None") -> int:
    """Prints the evaluation of every held-out set; returns the exit code.

    Raises:
        ConfigError: the run has no weights, or the data has no held-out set.
        CheckpointError: the weights cannot be read, or are of another model.
    """
    from nnxtrain.build.evaluators import bind_to, make_evaluators
    from nnxtrain.build.feed import open_data
    from nnxtrain.build.program import make_program
    from nnxtrain.build.registry import BUILT_IN
    from nnxtrain.checkpoint.saver import read_to_evaluate
    from nnxtrain.checkpoint.store import CheckpointStore
    from nnxtrain.host.compilation_cache import use_compilation_cache
    from nnxtrain.host.files import finite

    program = make_program(config, registry=registry or BUILT_IN)
    use_compilation_cache(config)
    data = open_data(program)
    if not data.dataset.held_out:
        raise ConfigError("there is no held-out set; set data.validation_path")
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        step, model = read_to_evaluate(store, program.restore_spec, averages=config.optimizer.averages)
    for name, evaluate in make_evaluators(data, bind_to(model)).items():
        if (result := evaluate(lambda: False)) is not None:
            print(json.dumps(finite({"step": step, "name": name, **result._asdict()})))
    return 0


if __name__ == "__main__":
    run(main)
