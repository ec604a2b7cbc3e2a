"""Glob patterns → files on disk."""

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nnxtrain.errors import ConfigError


def find_files(patterns: Iterable[str], *, key: str) -> list[Path]:
    """Returns the files that `patterns` name, sorted, each once.

    Brackets in a pattern are literal if there is a file or folder of that name; else they match one of the characters
    between them.

    Raises:
        ConfigError: a pattern matches no file, or only folders, or only empty files; names `key` and the pattern.
    """
    found: dict[Path, Path] = {}
    entries = list(patterns)
    for written in entries:
        pattern = _literal_brackets(os.path.expanduser(written))
        matches = [Path(match) for match in _matches(pattern)]
        files = [match for match in matches if match.is_file()]
        if not files and matches:
            hint = f"to read files in them, use a glob such as '{written.rstrip('/')}/**/*.txt'"
            raise ConfigError(f"{key}: {written!r} matches only folders; {hint}{_hint(written, len(entries))}")
        if not files:
            raise ConfigError(f"{key}: {written!r} matches nothing{_hint(written, len(entries))}")
        if not any(file.stat().st_size for file in files):
            raise ConfigError(f"{key}: {written!r} matches only empty files")
        found |= {file.resolve(): file for file in files}
    return sorted(found.values())


def _literal_brackets(pattern: str) -> str:
    """Returns `pattern` with `[` escaped in each part that exists literally as a file or folder."""
    done: list[str] = []
    for part in pattern.split("/"):
        escaped = part.replace("[", "[[]")
        is_name = escaped != part and next(_matches("/".join([*done, escaped])), None) is not None
        done.append(escaped if is_name else part)
    return "/".join(done)


def _hint(written: str, entries: int) -> str:
    """Returns how to write a name with a comma or brackets, if that may be why `written` matches nothing."""
    pattern = os.path.expanduser(written).rstrip("/")
    if torn := sorted({*glob.glob(f"{pattern},*"), *glob.glob(f"{glob.escape(pattern)},*")}):
        return f"; commas separate entries: if {torn[0]!r} is meant, write '{torn[0].replace(',', '?')}'"
    hints = []
    if "[" in written:
        hints.append("; [ab] matches one character, a or b: write [[] or ? for a bracket in a name")
    if entries > 1:
        hints.append("; commas separate entries: write ? for a comma in a name")
    return "".join(hints)


def _matches(pattern: str) -> Iterator[str]:
    """Yields what `glob.glob` does, but ends if links under `**` form loops."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    rest = "/".join(parts[at + 1 :]) or "*"
    for top in glob.iglob("/".join([*parts[:at], ""]) or "./"):
        for folder in _folders(top):
            yield from _matches(f"{glob.escape(folder)}/{rest}")


def _folders(top: str) -> Iterator[str]:
    """Yields `top` and the folders below it, also through links, each once; hidden ones are left out."""
    seen = set()
    for folder, below, _ in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = [] if real in seen else sorted(name for name in below if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield folder
