"""`python -m nnxtrain.profiling show DIR | merge DIR | compare DIR DIR`: figures from traces, without a browser."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnxtrain.cli.command import make_parser, refuse_empty, run
from nnxtrain.config.echo import echo
from nnxtrain.errors import ConfigError

if TYPE_CHECKING:
    from nnxtrain.profiling.page import Table

EPILOG = """\
examples:
  python -m nnxtrain.profiling show runs/tiny                  figures of every window of a run
  python -m nnxtrain.profiling show runs/tiny --html page.html
  python -m nnxtrain.profiling compare before/profile after/profile
  python -m nnxtrain.profiling merge runs/tiny                 all processes of a window in one session, for xprof

DIR is a run, a window, the folder of one process, or any folder with traces (*.xplane.pb).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser(
        "profiling",
        "Prints figures from traces: time per step, annotations, parts of the model, operations.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|merge|compare")
    show = commands.add_parser("show", help="the figures of every trace in DIR")
    show.add_argument("places", nargs=1, metavar="DIR")
    compare = commands.add_parser("compare", help="what got slower from the first DIR to the second, in ms a step")
    compare.add_argument("places", nargs=2, metavar="DIR")
    for command in (show, compare):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_argument("--html", metavar="FILE", help="also write a self-contained HTML page")
        command.add_argument("--top", type=int, default=10, metavar="N", help="rows of the long tables (default 10)")
    merging = commands.add_parser("merge", help="copy the traces of a window's processes into one session")
    merging.add_argument("places", nargs=1, metavar="DIR")
    arguments = parser.parse_args(argv)
    refuse_empty(arguments)
    places = [Path(place).expanduser() for place in arguments.places]
    if missing := [echo(place) for place in places if not os.path.exists(place)]:
        raise ConfigError(f"{' and '.join(missing)}: no such file or folder")
    if arguments.command == "merge":
        return _merge(*places)
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be at least 1")
    found, sections = (_show if arguments.command == "show" else _compare)(*places, top=arguments.top)
    return _report(arguments, found, sections)


def _merge(place: Path) -> int:
    from nnxtrain.profiling.merge import merge, truncated_timelines

    for folder in merge(place):
        print(f"{folder}  (xprof --logdir {folder})")
    for line in truncated_timelines(place):
        print(line)
    return 0


def _show(place: Path, *, top: int) -> tuple[Any, "list[tuple[str, list[Table]]]"]:
    """Returns the figures of each trace, and their tables."""
    from dataclasses import asdict

    from nnxtrain.profiling.page import digest_tables, name_of
    from nnxtrain.profiling.trace import digest_of, trace_files

    found, sections = [], []
    for file in trace_files(place):
        digest, name = digest_of(file), name_of(file)
        whole = {"step_ms": digest.step_ms, "data_wait_share": digest.data_wait_share}
        found.append({"name": name, "file": str(file)} | whole | asdict(digest))
        sections.append((name, digest_tables(digest, top=top)))
    return found, sections


def _compare(before: Path, after: Path, *, top: int) -> tuple[Any, "list[tuple[str, list[Table]]]"]:
    """Returns the changes from one place to another, and their tables."""
    from dataclasses import asdict

    from nnxtrain.profiling.compare import change_tables, changes
    from nnxtrain.profiling.trace import digest_of, trace_files

    found = changes(*([digest_of(file) for file in trace_files(place)] for place in (before, after)))
    rows = [asdict(change) | {"difference": change.difference} for change in found]
    return rows, [(f"{before} → {after}", change_tables(found, top=top))]


def _report(arguments: argparse.Namespace, found: Any, sections: "list[tuple[str, list[Table]]]") -> int:
    from nnxtrain.host.files import write_whole
    from nnxtrain.profiling.page import html_of, text_of

    if arguments.html:
        write_whole(Path(arguments.html), html_of(" ".join(arguments.places), sections))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{heading}\n\n{text_of(tables)}" for heading, tables in sections), end="")
    return 0


if __name__ == "__main__":
    run(main)
