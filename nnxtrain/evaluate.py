"""`python -m nnxtrain.evaluate RUN_DIR|CONFIG.yml [key=val ...]`: the loss of a run on its held-out sets."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from nnxtrain.config.command import choose_platform, make_parser, parse, run, traced
from nnxtrain.config.load import load
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError

if TYPE_CHECKING:
    from nnxtrain.tables import Tables

EPILOG = """\
example:
  python -m nnxtrain.evaluate runs/quickstart eval.max_batches=null

Prints one JSON object a set. Nothing in the run directory changes.
"""


def main(argv: Sequence[str] | None = None, *, tables: "Tables | None" = None) -> int:
    """Runs the command line; returns the exit code. `tables` hold entries from outside the package."""
    parser = make_parser("evaluate", "Evaluates the newest weights of a run on every held-out set.", epilog=EPILOG)
    parser.add_argument(
        "run", metavar="RUN_DIR|CONFIG.yml", help="a run, or the configuration that it was started with"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=val", help="keys that win")
    arguments = parse(argv, parser)
    place = Path(arguments.run)
    config = load(
        place / "config.yml" if place.is_dir() else place, arguments.overrides, extra=tables.names() if tables else None
    )
    folder = place if place.is_dir() else Path(config.output_dir).expanduser() / str(config.run_name)
    choose_platform(config)
    with traced(config):
        return evaluate_run(config, folder, tables)


def evaluate_run(config: Config, folder: Path, tables: "Tables | None") -> int:
    """Prints the evaluation of every held-out set; returns the exit code.

    Raises:
        ConfigError: the run has no weights, or the data has no held-out set.
        CheckpointError: the weights cannot be read, or are of another model.
    """
    from nnxtrain.build import bind_to, make_evaluators, make_program, open_data
    from nnxtrain.cache import use_compilation_cache
    from nnxtrain.checkpoint.saver import read_to_evaluate
    from nnxtrain.checkpoint.store import CheckpointStore
    from nnxtrain.run.directory import finite
    from nnxtrain.tables import BUILT_IN

    program = make_program(config, tables=tables or BUILT_IN)
    use_compilation_cache(config)
    data = open_data(program)
    if not data.dataset.held_out:
        raise ConfigError("there is no held-out set; data.validation_path names one")
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        step, model = read_to_evaluate(store, program.wanted, averages=config.optimizer.averages)
    for name, evaluate in make_evaluators(data, bind_to(model)).items():
        if (result := evaluate(lambda: False)) is not None:
            print(json.dumps(finite({"step": step, "name": name, **result._asdict()})))
    return 0


if __name__ == "__main__":
    run(main)
