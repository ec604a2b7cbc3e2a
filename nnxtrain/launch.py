"""`python -m nnxtrain.launch processes=2 -- train CONFIG.yml ...`: several processes of one run on one machine."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from nnxtrain.cli.command import LAUNCHED, run
from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError, LostProcessError

EPILOG = """\
example:
  python -m nnxtrain.launch processes=2 devices_per_process=4 -- train configs/tiny.yml mesh.fsdp=8

keys:
  processes            processes to start (default 2)
  devices_per_process  devices of each: so many CPU devices, or its share of the GPUs; 0 leaves both alone (default 0)
  grace_s              seconds that the others have to end once one has ended, before they are killed (default 120)

Every line of output begins with the number of its process. A signal goes on to all processes; they stop at one step.
The exit code is theirs; when one was lost it is named, and the exit code is 7.
"""
MODULES = ("train",)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEFAULTS = {"processes": 2, "devices_per_process": 0, "grace_s": 120}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(
        prog="python -m nnxtrain.launch",
        description="Starts several processes of one run on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="key=val", help="how many processes and devices; see below")
    settings = _settings(parser.parse_args(own).words)
    if not command or command[0] not in MODULES:
        raise ConfigError(f"after -- comes one of {', '.join(MODULES)}, with its words; see --help")
    line = sys.orig_argv if argv is None else [sys.orig_argv[0], "-m", "nnxtrain.launch", *argv]
    return _Group(command, {**os.environ, LAUNCHED: shlex.join(line)}, **settings).run()


class _Group:
    """The processes of one run, from their start to their end."""

    def __init__(
        self,
        command: Sequence[str],
        outer: Mapping[str, str],
        *,
        processes: int,
        devices_per_process: int,
        grace_s: int,
    ):
        self._grace_s = grace_s
        self._killed: set[int] = set()
        meet = f"127.0.0.1:{_free_port()}"
        module, *words = command
        line = [sys.executable, "-u", "-m", f"nnxtrain.{module}", *words]
        line += [f"distributed.coordinator={meet}", f"distributed.processes={processes}"]
        self._processes: list[subprocess.Popen[str]] = []
        for index in range(processes):
            self._processes.append(
                subprocess.Popen(
                    [*line, f"distributed.process={index}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=_environment(outer, index, devices_per_process),
                    start_new_session=True,  # a terminal's Ctrl-C reaches them through this process, once
                )
            )

    def run(self) -> int:
        """Shows what the processes say until all have ended; returns the exit code.

        Raises:
            LostProcessError: one was lost; names it.
        """
        threads = [threading.Thread(target=_show, args=(index, one.stdout)) for index, one in self._numbered()]
        for thread in threads:
            thread.start()
        before = {number: signal.signal(number, self._pass_on) for number in STOPS}
        lost = self._wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        for thread in threads:
            thread.join()
        codes = [process.returncode for process in self._processes]
        if lost is None:
            return codes[0]
        if lost in self._killed:
            raise LostProcessError(
                f"process {lost} of {len(codes)} had not ended grace_s={self._grace_s} seconds after another one had, "
                "and was killed"
            )
        if codes[lost] > 0 and codes[lost] != LostProcessError.exit_code:
            print(f"process {lost} of {len(codes)} ended with exit code {codes[lost]}", file=sys.stderr)
            return codes[lost]
        raise LostProcessError(f"process {lost} of {len(codes)} was lost ({_how(codes[lost])})")

    def _wait(self) -> int | None:
        """Returns when all have ended: the number of the one that was lost first, or None if all ended alike.

        From the first end on, whatever its exit code, the others have `grace_s` to end.
        """
        deadline: float | None = None
        ended: list[int] = []
        while len(ended) < len(self._processes):
            ended += [index for index, one in self._numbered() if one.poll() is not None and index not in ended]
            if ended and deadline is None:
                deadline = time.monotonic() + self._grace_s
            if deadline is not None and time.monotonic() > deadline:
                self._killed |= {index for index, one in self._numbered() if one.poll() is None}
                for process in self._processes:
                    process.kill()
            time.sleep(0.05)
        codes = [process.returncode for process in self._processes]
        if len(set(codes)) == 1 and codes[0] >= 0:
            return None
        # a process that notices a loss may be seen to end before the one that was lost
        return min(ended, key=lambda index: (codes[index] in NOTICED or codes[index] == 0, ended.index(index)))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _numbered(self) -> list[tuple[int, subprocess.Popen[str]]]:
        return list(enumerate(self._processes))


# how a process ends that finds another one lost: with its own word, or aborted by jax's coordination service
NOTICED = (LostProcessError.exit_code, -signal.SIGABRT)


def _settings(words: Sequence[str]) -> dict[str, int]:
    """Returns the settings with `key=val` words put into them."""
    settings = dict(DEFAULTS)
    for word in words:
        name, _, value = word.partition("=")
        if name not in DEFAULTS:
            rest = "words for the run come after --"
            raise ConfigError(f"'{echo(word)}': {echo(name)} is not one of {', '.join(DEFAULTS)}; {rest}")
        is_number = value.isascii() and value.isdecimal() and len(value) < 10
        if not is_number or (name == "processes" and int(value) < 1):
            raise ConfigError(f"'{echo(word)}': {name} is a number" + (", at least 1" if name == "processes" else ""))
        settings[name] = int(value)
    return settings


def _environment(outer: Mapping[str, str], index: int, devices: int) -> dict[str, str]:
    """Returns the environment of process `index`: the package that this module is of, so many devices; 0 for all."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [outer.get("PYTHONPATH")])]
    same = {**outer, "PYTHONPATH": os.pathsep.join(paths)}
    if not devices:
        return same
    flags = f"{outer.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    last = (index + 1) * devices
    there = outer.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(last)))
    return {**same, "XLA_FLAGS": flags, "CUDA_VISIBLE_DEVICES": ",".join(there.split(",")[last - devices : last])}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show(index: int, stream: IO[str] | None) -> None:
    """Writes the lines of a process behind its number, without those of the library that connects CPU devices."""
    for line in stream or ():
        if not line.startswith("[Gloo] Rank"):
            sys.stdout.write(f"[{index}] {line}")
            sys.stdout.flush()


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    run(main)
