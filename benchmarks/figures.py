"""What benchmarks share: spreads of repeated figures, tables for people, reports for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

WIDTH = 120  # of a table, where a terminal's is not known


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, p10 and p90."""
    return {name: float(np.percentile(values, share)) for name, share in (("median", 50), ("p10", 10), ("p90", 90))}


def shown(figure: Any, scale: float = 1.0) -> str:
    """Returns a figure as text, with its spread if it has one, times `scale`."""
    if isinstance(figure, Mapping):
        median, low, high = (shown(figure[name], scale) for name in ("median", "p10", "p90"))
        return f"{median} ({low} to {high})"
    value = figure * scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of text below their columns; all but the first are set to the right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=WIDTH)).print(table)


def write_report(report: Mapping[str, Any], path: str) -> None:
    """Writes a report as JSON, if a path is given."""
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
