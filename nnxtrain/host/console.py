"""What a run tells people while it goes: a live bar on a terminal, plain lines elsewhere, all of it in `train.log`."""

import logging
import sys
from pathlib import Path

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nnxtrain.host.files import AppendFile, explain


class _Screen(RichConsole):
    """Standard output; a reader that goes away, as `head` does, ends the output and not the run."""

    def on_broken_pipe(self) -> None:
        """Goes quiet."""
        self.quiet = True


class Console(logging.Handler):
    """Writes lines and progress; log records of the package are lines too."""

    def __init__(self, mode: str):
        """Starts writing to standard output.

        Args:
            mode: `bar`, `lines`, `auto` for a bar on a terminal, or `quiet` to write to the log alone.
        """
        super().__init__()
        self._rich = _Screen(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._rich.quiet = mode == "quiet"
        self._bar: Progress | None = None
        self._wants_bar = mode == "bar" or (mode == "auto" and self._rich.is_terminal)
        self._log: AppendFile | None = None
        self._is_log_full = False
        self._early: list[str] = []

    def open_log(self, path: Path) -> None:
        """Appends everything, also what was said before, to a file."""
        self._log = AppendFile(path)
        for line in self._early:
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Says a log record."""
        self.say(self.format(record))

    def say(self, line: str) -> None:
        """Writes a line."""
        self._show(line)
        self._write(line)

    def start(self, *, done: int, total: int) -> None:
        """Begins to show progress."""
        if self._wants_bar:
            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._rich)
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def progress(self, step: int, total: int, line: str, *, due: bool) -> None:
        """Shows that `step` of `total` is done; `line` goes to the log, and to a plain console, where it is `due`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        if due:
            text = f"step {step:>{len(str(total))}}/{total}  {line}"
            if self._bar is None:
                self._show(text)
            self._write(text)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        """Ends the log."""
        self.stop()
        if self._log is not None:
            self._log.close()
            self._log = None
        super().close()

    def _show(self, line: str) -> None:
        """Writes a line to the screen; one that cannot be written to any more ends the output and not the run."""
        try:
            self._rich.print(line, markup=False)
        except OSError:
            self._rich.on_broken_pipe()

    def _write(self, line: str) -> None:
        if self._log is None:
            self._early.append(line)
            return
        try:
            self._log.append(f"{line}\n".encode(errors="replace"))
        except OSError as error:  # a log that is full is no reason to lose a run
            if not self._is_log_full:
                self._is_log_full = True
                self._show(f"warning  a line is missing in {explain(error)}")
