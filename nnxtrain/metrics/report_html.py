"""Curves and tables for people: `report.html`, which needs no other file, and `loss.png`."""

import html
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nnxtrain.host.files import write_whole

WIDTH, HEIGHT, MARGIN = 720, 300, 56
POINTS = 600  # of a curve
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


class Curve(NamedTuple):
    """A named line through points (step, value)."""

    name: str
    points: Sequence[tuple[float, float]]


def run_curves(steps: Mapping[str, Sequence[float]], evaluations: Sequence[dict[str, Any]]) -> dict[str, list[Curve]]:
    """Returns title → lines of everything that a report shows; the first is the loss.

    Args:
        steps: field of a training step → its value at each step, `step` among them.
        evaluations: rows of `metrics.jsonl`.
    """

    def line(name: str, field: str) -> list[Curve]:
        return [_thinned(name, steps["step"], steps[field])] if steps["step"] else []

    def held_out(name: str) -> Curve:
        rows = [row for row in evaluations if row["name"] == name]
        return _thinned(name, [row["step"] for row in rows], [row["loss"] for row in rows])

    names = dict.fromkeys(row["name"] for row in evaluations)
    return {
        "Loss (nats per target)": [*line("train", "loss"), *map(held_out, names)],
        "Learning rate": line("learning rate", "learning_rate"),
        "Gradient norm, before clipping": line("norm", "grad_norm"),
        "Tokens per second": line("tokens/s", "tokens_per_s"),
    }


def _thinned(name: str, xs: Sequence[float], ys: Sequence[float]) -> Curve:
    """Returns a curve of at most `POINTS` points and the last."""
    places = [*range(0, len(xs) - 1, -(-len(xs) // POINTS)), len(xs) - 1]
    return Curve(name, [(xs[place], ys[place]) for place in places])


def write_report(
    folder: Path, *, curves: dict[str, list[Curve]], summary: dict[str, Any], config: str, with_picture: bool = True
) -> None:
    """Writes `report.html`, and `loss.png` where matplotlib is installed.

    Args:
        folder: run directory; its `samples/` are shown, newest first.
        curves: title → lines; the first is the loss.
        summary: what `summary.json` holds.
        config: resolved YAML.
        with_picture: whether `loss.png` is written too, which takes longer than all the rest.
    """
    samples = sorted((folder / "samples").glob("step_*.txt"), reverse=True)
    parts = [f"<h2>{html.escape(title)}</h2>{svg(lines)}" for title, lines in curves.items() if lines]
    parts.append(f"<h2>Summary</h2>{_table(summary)}")
    parts += [
        f"<h2>Sample, {path.stem}</h2><pre>{html.escape(path.read_text(encoding='utf-8'))}</pre>"
        for path in samples[:3]
    ]
    parts.append(f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>")
    write_whole(folder / "report.html", _page(folder.name, "\n".join(parts)))
    loss = next(iter(curves.values()))
    if with_picture and loss and importlib.util.find_spec("matplotlib"):
        _write_png(folder / "loss.png", loss)


def svg(curves: Sequence[Curve]) -> str:
    """Returns a line chart as an `<svg>` element."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = sorted(y for curve in curves for _, y in curve.points if y == y and abs(y) != float("inf"))
    if not ys:
        return "<p>no finite values</p>"
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = ys[0], ys[-1]
    span = high - low or 1.0

    def place(x: float, y: float) -> str:
        across = MARGIN + (x - left) / (right - left) * (WIDTH - 2 * MARGIN)
        return f"{across:.1f},{HEIGHT - MARGIN / 2 - (y - low) / span * (HEIGHT - MARGIN):.1f}"

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = HEIGHT - MARGIN / 2 - share * (HEIGHT - MARGIN)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{low + share * span:.4g}</text>')
        x = MARGIN + share * (WIDTH - 2 * MARGIN)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{left + share * (right - left):.0f}</text>'
        )
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        shown = [point for point in curve.points if low <= point[1] <= high]
        line = " ".join(place(*point) for point in shown)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(curve.points) < 40:
            parts += [_dot(place(*point), colour) for point in shown]
        label = f'x="{WIDTH - MARGIN}" y="{20 + 16 * number}" text-anchor="end" fill="{colour}"'
        parts.append(f"<text {label}>{html.escape(curve.name)}</text>")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _dot(place: str, colour: str) -> str:
    x, y = place.split(",")
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'


def _table(values: dict[str, Any]) -> str:
    rows = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(_text(value))}</td></tr>" for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _page(title: str, body: str) -> str:
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em;color:#222}"
        "svg{width:100%;font-size:11px;fill:#555}pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:13px}"
        "th{text-align:left;font-weight:500;padding-right:2em;vertical-align:top}td{overflow-wrap:anywhere}"
    )
    name = html.escape(title)
    head = f'<meta charset="utf-8"><title>{name}</title><style>{style}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{name}</h1>{body}</body></html>\n"


def _write_png(path: Path, curves: Sequence[Curve]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        marker = "o" if len(curve.points) < 40 else None
        axes.plot(*zip(*curve.points, strict=True), label=curve.name, linewidth=1.2, marker=marker, markersize=3)
    axes.set(xlabel="step", ylabel="loss (nats per target)")
    axes.grid(alpha=0.3)
    axes.legend()
    part = path.with_name(f".{path.name}")
    figure.savefig(part, format="png")
    part.replace(path)
