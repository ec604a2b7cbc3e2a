"""The command line that the entry points share: a configuration file, `key=val` words, and questions about keys."""

import argparse
import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nnxtrain.config.load import list_keys, load, to_yaml
from nnxtrain.config.schema import Config
from nnxtrain.errors import STOPPED, ConfigError, UserError
from nnxtrain.host.files import explain
from nnxtrain.host.streams import make_streams_last

LAUNCHED = "NNXTRAIN_LAUNCHED"  # variable that holds the command line of `nnxtrain.launch` for the processes it starts


def make_parser(name: str, description: str, *, epilog: str) -> argparse.ArgumentParser:
    """Returns the parser of the entry point `nnxtrain.NAME`; `epilog` keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"python -m nnxtrain.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(argv: Sequence[str] | None, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses words and flags in any order; a flag that does not exist is refused with the way to write a key."""
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        parser.error(f"unknown flag {unknown[0]}; keys are written without dashes, such as {name}=VALUE")
    return arguments


def answer_about_keys(arguments: argparse.Namespace) -> bool:
    """Prints the keys that `--list-keys` asks for; tells whether it was asked."""
    if arguments.list_keys is None:
        return False
    found = list_keys(arguments.list_keys)
    if not found:
        raise ConfigError(f"--list-keys: no key starts with {arguments.list_keys!r}")
    for path, kind, default, doc in found:
        print(f"{path:32} {kind:14} {default:14} {doc}")
    return True


def load_config(arguments: argparse.Namespace, *, extra: Mapping[str, Collection[str]] | None) -> Config:
    """Loads the configuration that the words name; `extra` is that of `load`."""
    if arguments.config is None:
        raise ConfigError("a configuration file is missing, such as configs/quickstart.yml; see --help")
    if "=" in arguments.config and not Path(arguments.config).exists():
        raise ConfigError(f"the first word must be a configuration file, not {arguments.config!r}; see --help")
    return load(arguments.config, arguments.overrides, extra=extra)


def print_config(config: Config) -> None:
    """Prints the resolved configuration; `load` reads it back."""
    print(to_yaml(config), end="")


def leave_on_signals() -> None:
    """Ends the process in good order on SIGTERM and SIGINT, as long as there is nothing to save."""

    def leave(number: int, frame: FrameType | None) -> None:
        print(f"{signal.Signals(number).name}: nothing to save; exiting", file=sys.stderr, flush=True)
        os._exit(STOPPED)

    if threading.current_thread() is threading.main_thread():  # elsewhere signals are the caller's
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)


@contextlib.contextmanager
def traced(config: Config) -> Iterator[None]:
    """Prints where an error came from, if `debug.traceback` asks for it."""
    try:
        yield
    except (UserError, OSError):
        if config.debug.traceback:
            traceback.print_exc()
        raise


def guarded(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Runs an entry point; what a user can cause ends with one message and the exit code of its kind."""
    try:
        return main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a file or folder that somebody else made, moved or filled
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def run(main: Callable[..., int], **options: Any) -> NoReturn:
    """Runs an entry point on the words of the command line and ends the process with its exit code.

    Whatever happens to the standard streams, the exit code is that of the work. After a failure the process ends at
    once: orbax's threads would wait on for minutes after a save that failed.
    """
    make_streams_last()
    code = guarded(functools.partial(main, **options))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(code)
