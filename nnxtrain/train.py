"""`python -m nnxtrain.train CONFIG.yml [key=val ...]`: trains, evaluates, writes samples."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nnxtrain.cli.command import (
    EVERY_KEY,
    LAUNCHED,
    answer_about_keys,
    exit_on_signals,
    load_config,
    make_parser,
    parse,
    print_config,
    run,
    traced,
)
from nnxtrain.config.record import as_mapping, differences, recorded
from nnxtrain.config.schema import Config
from nnxtrain.errors import ConfigError
from nnxtrain.host.platform import choose_platform
from nnxtrain.run.directory import read_summary

if TYPE_CHECKING:
    from nnxtrain.build.registry import Registry

EPILOG = """\
commands:
  python -m nnxtrain.train CONFIG.yml [key=val ...]                train or resume, evaluate, write samples
  python -m nnxtrain.evaluate RUN_DIR|CONFIG.yml [key=val ...]     loss on the held-out sets
  python -m nnxtrain.generate RUN_DIR [key=val ...]                generate text
  python -m nnxtrain.aot CONFIG.yml aot.topology=v5e:4x4 ...       compile only: will it fit, what limits it
  python -m nnxtrain.launch processes=2 -- train CONFIG.yml ...    several processes on this machine
  python -m nnxtrain.profiling show RUN_DIR                        figures from the traces of a run

examples:
  python -m nnxtrain.train configs/quickstart.yml steps=100 optimizer.learning_rate=1e-3
  python -m nnxtrain.train configs/quickstart.yml data.source=text data.path='corpus/*.txt'
  python -m nnxtrain.train configs/llama2-7b.yml --dry-run
  python -m nnxtrain.train configs/quickstart.yml schedule.name=wsd --show-schedule
  python -m nnxtrain.train --list-keys model

Later key=val words take precedence. A run writes to OUTPUT_DIR/RUN_NAME, by default runs/ and the name of the file.
Started again, it resumes from its newest checkpoint. On SIGTERM or SIGINT it saves and exits with 75.

exit codes: 0 done, 1 unexpected failure, 2 configuration or usage, 4 loss or gradients not finite, 5 data,
            6 checkpoint, 7 another process was lost, 75 stopped by a signal, everything saved,
            128+n ended at once by a second signal n
"""

DRY_RUN = "check the configuration and the first MiB of text files, print parameters and bytes, and exit"


def main(argv: Sequence[str] | None = None, *, registry: "Registry | None" = None) -> int:
    """Runs the command line; returns the exit code. `registry` contains entries from outside the package."""
    began = time.monotonic()
    parser = make_parser("train", "Trains a language model.", epilog=EPILOG)
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.yml", help="configuration file; contains what differs from the defaults"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=val", help="keys that override the file")
    parser.add_argument(
        "--list-keys", nargs="?", const=EVERY_KEY, metavar="PREFIX", help="print every key: type, default, meaning"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration as YAML, and exit"
    )
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    parser.add_argument("--show-schedule", action="store_true", help="plot the learning rate, and exit")
    arguments = parse(argv, parser)
    if answer_about_keys(arguments):
        return 0
    extra = registry.names() if registry else None
    config = load_config(arguments, command="train", extra=extra)
    if arguments.print_config:
        print_config(config)
        return 0
    folder = Path(config.output_dir).expanduser() / str(config.run_name)
    asks = arguments.dry_run or arguments.show_schedule
    if not asks and _is_finished(config, folder):
        return 0
    choose_platform(config)
    exit_on_signals()
    from nnxtrain.build.registry import BUILT_IN

    parts = registry or BUILT_IN
    with traced(config):
        if arguments.show_schedule:
            from nnxtrain.cli.show_schedule import show_schedule

            return show_schedule(config, parts)
        if arguments.dry_run:
            from nnxtrain.cli.dry_run import dry_run

            return dry_run(config, parts)
        from nnxtrain.run.run import execute

        return execute(config, folder, registry=parts, began=began, command=_command(argv))


def _command(argv: Sequence[str] | None) -> Sequence[str]:
    """Returns the words of the command line: those of `launch` where it started this process."""
    if started := os.environ.get(LAUNCHED):
        return shlex.split(started)
    python = sys.orig_argv[0]
    return sys.orig_argv if argv is None else [python, "-m", "nnxtrain.train", *argv]


def _is_finished(config: Config, folder: Path) -> bool:
    """Returns whether the run in `folder` is finished, and prints it.

    It is when it is done and no more steps are requested, or when its data ended and no key has changed.

    Raises:
        ConfigError: the folder was used before and `checkpoint.resume=never`.
    """
    if config.checkpoint.resume == "never" and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"checkpoint.resume=never: {folder} is not empty; choose another run_name, or delete it")
    summary = read_summary(folder)
    if summary is None or summary["status"] != "done" or config.checkpoint.resume.isdecimal():
        return False
    before = recorded(folder / "config.yml")  # as recorded: it may be of another version
    changes = differences(before, as_mapping(config)) if before else []
    if summary["step"] < config.steps and changes:
        return False
    print(f"{folder} is finished: step {summary['step']}, final loss {summary['final_loss']}. Nothing was done.")
    if changes:
        print("  this configuration differs from that of the run:", *changes, sep="\n    ")
    print(f"  report       {folder}/report.html")
    if any((folder / "checkpoints").glob("*")):
        print(f"  generate     python -m nnxtrain.generate {folder}")
    more = (
        f"steps={2 * max(config.steps, summary['step'])}"
        if summary["step"] >= config.steps
        else "data.epochs: the data ended before steps"
    )
    print(f"  continue     with more {more}")
    print(f"  start over   choose another run_name=NAME, or delete {folder}")
    return True


if __name__ == "__main__":
    run(main)
