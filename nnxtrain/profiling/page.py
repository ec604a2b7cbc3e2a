"""Tables as plain text and as a self-contained HTML page."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nnxtrain.profiling.trace import Digest, Total

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px}th{text-align:left;font-weight:500;border-bottom:1px solid #bbb}"
    "th,td{padding:2px 1.5em 2px 4px}td.n{text-align:right;font-variant-numeric:tabular-nums}h2{margin-top:2em}"
)


class Share(float):
    """A fraction, 0 to 1, shown as a percentage."""


class Table(NamedTuple):
    """A table with a title and rows of text or numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str | int | float, ...]]


def digest_tables(digest: Digest, *, top: int = 10) -> list[Table]:
    """Returns the tables of one trace, with the `top` largest operations."""
    steps = Table(
        "Steps", ("step", "ms", "data wait ms"), [(one.step, one.ms, one.data_wait_ms) for one in digest.steps]
    )
    middle, share = digest.step_ms, digest.data_wait_share
    whole = [
        ("median step, ms", middle),
        ("data wait, share of step time", None if share is None else Share(share)),
    ]
    return [
        Table("Summary", ("figure", "value"), [(name, "-" if value is None else value) for name, value in whole]),
        steps,
        Table(
            "Host annotations",
            ("annotation", "calls", "ms", "ms/call"),
            [(one.name, one.calls, one.ms, one.ms / one.calls) for one in digest.annotations],
        ),
        _shares("Parts of the model", ("part", "direction"), digest.parts, top=len(digest.parts)),
        _shares("Operations", ("operation", "program and part"), digest.operations, top=top),
    ]


def text_of(tables: Iterable[Table]) -> str:
    """Returns tables as plain text with aligned columns."""
    blocks = []
    for table in tables:
        cells = [table.columns, *(tuple(map(_show, row)) for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numeric = [bool(table.rows) and not isinstance(value, str) for value in (table.rows or [table.columns])[0]]
        lines = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in cells
        ]
        blocks.append("\n  ".join([table.title, *lines]) + "\n")
    return "\n".join(blocks)


def html_of(title: str, sections: Iterable[tuple[str, Iterable[Table]]]) -> str:
    """Returns an HTML page; each section has a heading and tables."""
    parts = []
    for heading, tables in sections:
        parts.append(f"<h1>{html.escape(heading)}</h1>")
        parts += [f"<h2>{html.escape(table.title)}</h2>{_html_table(table)}" for table in tables]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def name_of(file: Path) -> str:
    """Returns the name of a trace: window and process, or the file name if it is not in a window."""
    window_and_process = file.parts[-6:-4]
    return "/".join(window_and_process) if file.parts[-4:-2] == ("plugins", "profile") else file.name


def _shares(title: str, names: tuple[str, str], totals: Sequence[Total], *, top: int) -> Table:
    whole = sum(total.ms for total in totals) or 1.0
    rows = [(one.name, one.detail, one.calls, one.ms, Share(one.ms / whole)) for one in totals[:top]]
    return Table(title, (*names, "calls", "ms", "share of operation time"), rows)


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in table.rows)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _html_cell(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    bar = ""
    if isinstance(value, Share):
        bar = f' style="background:linear-gradient(90deg,#cfe3f5 {100 * value:.1f}%,transparent 0)"'
    return f'<td class="n"{bar}>{_show(value)}</td>'


def _show(value: str | int | float) -> str:
    if isinstance(value, Share):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
