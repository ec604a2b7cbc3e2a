"""The command line that the entry points share: a configuration file, `key=val` words, `--list-keys`."""

import argparse
import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from nnxtrain.config.checks import LEAVES, dubious_settings, value_at
from nnxtrain.config.echo import echo, visible
from nnxtrain.config.load import load
from nnxtrain.config.reads import show
from nnxtrain.config.record import list_keys, to_yaml
from nnxtrain.config.schema import Config
from nnxtrain.errors import STOPPED, ConfigError, UserError
from nnxtrain.host.files import explain
from nnxtrain.host.streams import make_streams_last

LAUNCHED = "NNXTRAIN_LAUNCHED"  # variable that holds the command line of `nnxtrain.launch` for the processes it starts

EVERY_KEY = "*"  # the prefix of --list-keys alone
LONGEST_MESSAGE = 400  # characters of a message about the command line, or of a file name in it
PAIRS = ("overrides", "words")  # arguments of key=val words, which are checked elsewhere
NAMES = {"config": "CONFIG.yml", "run": "RUN_DIR", "places": "DIR"}  # of positional arguments


def make_parser(name: str, description: str, *, epilog: str) -> argparse.ArgumentParser:
    """Returns the parser of the entry point `nnxtrain.NAME`; `epilog` keeps its line breaks."""
    return _Parser(
        prog=f"python -m nnxtrain.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, foreign text escaped and truncated."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the error; exits with 2."""
        super().error(echo(message, longest=LONGEST_MESSAGE))


def parse(argv: Sequence[str] | None, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses words and flags in any order; the error for an unknown flag shows how to set a key."""
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        parser.error(f"unknown flag {echo(unknown[0])}; keys are written without dashes, such as {echo(name)}=VALUE")
    refuse_empty(arguments)
    return arguments


def refuse_empty(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if a flag, file or folder is an empty string."""
    for name, value in vars(arguments).items():
        if value == "" or (isinstance(value, list) and "" in value and name not in PAIRS):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{NAMES.get(name, flag)} '': must not be empty; see --help")


def answer_about_keys(arguments: argparse.Namespace) -> bool:
    """Prints the keys that `--list-keys` selects; returns whether the flag was given."""
    if arguments.list_keys is None:
        return False
    found = list_keys("" if arguments.list_keys == EVERY_KEY else arguments.list_keys)
    if not found:
        raise ConfigError(f"--list-keys: no key starts with '{echo(arguments.list_keys)}'")
    for path, kind, default, doc in found:
        print(f"{path:32} {kind:14} {default:14} {doc}")
    return True


def load_config(arguments: argparse.Namespace, *, command: str, extra: Mapping[str, Collection[str]] | None) -> Config:
    """Loads the configuration for `nnxtrain.COMMAND`; `extra` is that of `load`.

    Prints a note for each key that has no effect on this command.
    """
    if arguments.config is None:
        raise ConfigError("a configuration file is required, such as configs/quickstart.yml; see --help")
    if "=" in arguments.config and not os.path.exists(arguments.config):  # Path.exists fails if a name is too long
        raise ConfigError(
            f"the first argument must be a configuration file, not '{echo(arguments.config)}'; see --help"
        )
    config = load(arguments.config, arguments.overrides, extra=extra, say=note)
    for path in sorted(config.given):
        rule, value = LEAVES[path].declared.metadata["read"], value_at(config, path)
        if rule is not None and rule.command not in ("", command) and value != LEAVES[path].default:
            note(f"{path}={show(value)} has no effect here: it is read by python -m nnxtrain.{rule.command}")
    for line in dubious_settings(config):
        note(line)
    return config


def note(line: str) -> None:
    """Prints a note about something that is allowed but may not be intended."""
    print(f"note: {visible(line)}", file=sys.stderr)


def print_config(config: Config) -> None:
    """Prints the resolved configuration; `load` reads it back."""
    print(to_yaml(config), end="")


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGINT end the process at once, while there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        print(f"{signal.Signals(number).name}: nothing to save; exiting", file=sys.stderr, flush=True)
        os._exit(STOPPED)

    if threading.current_thread() is threading.main_thread():  # in other threads signals belong to the caller
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)


@contextlib.contextmanager
def traced(config: Config) -> Iterator[None]:
    """Prints the traceback of an error if `debug.traceback` is set."""
    try:
        yield
    except (UserError, OSError):
        if config.debug.traceback:
            traceback.print_exc()
        raise


def guarded(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Runs an entry point; errors that a user can cause become one message and their exit code."""
    try:
        return main(argv)
    except UserError as error:
        print(f"error: {visible(error)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a file or folder that is missing, not writable or on a full disk
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def run(main: Callable[..., int], **options: Any) -> NoReturn:
    """Runs an entry point on the command line and exits with its exit code.

    Whatever happens to the standard streams, the exit code is that of the work. After anything but success or a refusal
    the process ends at once: orbax's threads would wait on for minutes after a save that failed.
    """
    make_streams_last()
    code = guarded(functools.partial(main, **options))
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, ConfigError.exit_code):
        os._exit(code)
    sys.exit(code)
