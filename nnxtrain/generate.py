"""`python -m nnxtrain.generate RUN_DIR [key=val ...]`: generates text with the newest weights of a run."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from nnxtrain.cli.command import make_parser, note, parse, run, traced
from nnxtrain.cli.unread import unread_words
from nnxtrain.config.echo import echo
from nnxtrain.config.generate import GenerateConfig
from nnxtrain.config.load import load
from nnxtrain.config.record import list_keys, recorded
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError
from nnxtrain.host.platform import choose_platform

if TYPE_CHECKING:
    from nnxtrain.build.registry import Registry

EPILOG = """\
example:
  python -m nnxtrain.generate runs/quickstart prompt="class " tokens=400 temperature=0.7 top_k=40

keys:
"""


def main(argv: Sequence[str] | None = None, *, registry: "Registry | None" = None) -> int:
    """Runs the command line; returns the exit code. `registry` contains entries from outside the package."""
    keys = "\n".join(f"  {path.removeprefix('generate.'):14}{doc} (default {default})"
                     for path, _, default, doc in list_keys("generate."))  # fmt: skip
    parser = make_parser("generate", "Generates text with the newest weights of a run.", epilog=EPILOG + keys)
    parser.add_argument("run", metavar="RUN_DIR", help="run directory, such as runs/quickstart")
    parser.add_argument(
        "words", nargs="*", metavar="key=val", help="the keys below; other keys of the run as section.key=val"
    )
    arguments = parse(argv, parser)
    folder = Path(arguments.run)
    if not os.path.isfile(folder / "config.yml"):  # Path.is_file fails if a name is too long
        raise ConfigError(f"{echo(folder)} is not a run directory: it contains no config.yml")
    own = {field.name for field in fields(GenerateConfig)}
    words = [f"generate.{word}" if word.partition("=")[0] in own else word for word in arguments.words]
    config = load(folder / "config.yml", words, extra=registry.names() if registry else None, say=note)
    for line in unread_words(words, config, recorded(folder / "config.yml"), command="generate"):
        note(line)
    choose_platform(config)
    with traced(config):
        print(write_text(folder, config, registry))
    return 0


def write_text(folder: Path, config: Config, registry: "Registry | None") -> str:
    """Returns the prompt and its continuation by the model.

    Raises:
        CheckpointError: the run has no weights yet, or they cannot be read.
    """
    from nnxtrain.build.evaluators import bind_to, make_writer
    from nnxtrain.build.program import make_program, on_one_device
    from nnxtrain.build.registry import BUILT_IN
    from nnxtrain.checkpoint.saver import read_to_evaluate
    from nnxtrain.checkpoint.store import CheckpointStore
    from nnxtrain.host.compilation_cache import use_compilation_cache

    program = make_program(on_one_device(config), registry=registry or BUILT_IN)
    use_compilation_cache(config)
    with closing(CheckpointStore(folder / "checkpoints", config.checkpoint)) as store:
        _, model = read_to_evaluate(store, program.restore_spec, averages=config.optimizer.averages)
    return make_writer(config, program.tokenizer, bind_to(model))()


if __name__ == "__main__":
    run(main)
