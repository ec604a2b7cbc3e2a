"""Spreads of repeated measurements, and JSON reports."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnxtrain.host.files import write_whole


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, p10 and p90."""
    return {name: float(np.percentile(values, share)) for name, share in (("median", 50), ("p10", 10), ("p90", 90))}


def shown(figure: Any, scale: float = 1.0) -> str:
    """Returns a figure times `scale` as text, with its spread if it has one."""
    if isinstance(figure, Mapping):
        median, low, high = (shown(figure[name], scale) for name in ("median", "p10", "p90"))
        return f"{median} ({low} to {high})"
    value = figure * scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def write_report(report: Mapping[str, Any], path: str) -> None:
    """Writes a report as JSON, if a path is given."""
    if path:
        write_whole(Path(path), json.dumps(report, indent=2) + "\n")
