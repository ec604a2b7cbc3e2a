"""Standard streams that cannot end the process: a closed one, a full device, a reader that has left."""

import contextlib
import io
import os
import sys
from typing import IO, TextIO, cast


class _LastingOutput(io.RawIOBase):
    """A descriptor to write to; once that fails, everything is thrown away.

    Attributes:
        error: what the first write that failed said, or None.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Returns whether a terminal shows what is written."""
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Writes all of `data`, or throws the rest away where nothing can be written any more; returns its length."""
        size = len(data)
        while len(data) and self.error is None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # a pipe that somebody else made so
                os.set_blocking(self._descriptor, True)
            except OSError as error:
                self.error = error
                with contextlib.suppress(OSError):  # libraries that write to the descriptor themselves fall silent too
                    _point_to_nothing(self._descriptor)
        return size


def make_streams_last() -> None:
    """Opens the standard streams that are closed, on nothing, and makes writing to the others raise no error.

    A closed descriptor must not stay free: the next file that is opened would get its number, and with it whatever a
    library writes to the console.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _point_to_nothing(descriptor)
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    """Returns a stream like `stream` that never raises; None is one that was closed when the process started."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper) or _descriptor_of(stream) != descriptor:
        return stream  # a caller has put its own in place of the standard one
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _LastingOutput(descriptor)
    return io.TextIOWrapper(
        cast("IO[bytes]", raw if stream.write_through else io.BufferedWriter(cast("io.RawIOBase", raw))),
        encoding=stream.encoding,
        errors="replace",  # a terminal that cannot show a character is no reason to stop
        line_buffering=stream.line_buffering or descriptor == 2,
        write_through=stream.write_through,
    )


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream in memory, or one that is closed
        return None


def _point_to_nothing(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(nothing, True)  # for processes that this one starts
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
