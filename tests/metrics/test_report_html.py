"""The report of a run."""

import xml.etree.ElementTree as ElementTree

import pytest

from nnxtrain.metrics.report_html import Curve, run_curves, svg, write_report


def test_a_chart_is_well_formed_and_stays_in_its_frame():
    """Points outside the frame, or names that break the markup, spoil the page."""
    curve = Curve("a <b> & c", [(step, 5 / (step + 1)) for step in range(600)])
    root = ElementTree.fromstring(svg([curve, Curve("other", [(10, 3.0)])]))
    lines = [element.get("points") for element in root.iter("polyline")]
    assert len(lines) == 2
    points = [tuple(map(float, point.split(","))) for point in lines[0].split()]
    assert len(points) == 600
    assert all(0 <= x <= 720 and 0 <= y <= 300 for x, y in points)


@pytest.mark.parametrize(
    "points", [[(1, float("nan"))], [(1, 2.0)], [(1, float("inf")), (2, 1.0)], [(1, 2.0), (2, 2.0)], [(1, 1e38)]]
)
def test_odd_curves_do_not_break_the_chart(points):
    """A run that went wrong is the one whose report is read."""
    ElementTree.fromstring(svg([Curve("loss", points)]))


def test_a_report_holds_everything_and_loads_nothing(tmp_path):
    """The page is sent around by mail: no script, no link, nothing from elsewhere."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00000001.txt").write_text("def f(): return '<tag>'")
    steps = {"step": [1, 2], "loss": [2.0, 1.5], "learning_rate": [1, 1], "grad_norm": [1, 1], "tokens_per_s": [9, 9]}
    evaluations = [{"step": 2, "loss": 1.6, "name": "validation"}, {"step": 2, "loss": 1.7, "name": "code"}]
    curves = run_curves(steps, evaluations)
    assert [curve.name for curve in next(iter(curves.values()))] == ["train", "validation", "code"]
    write_report(tmp_path, curves=curves, summary={"final_loss": 1.5, "reason": None}, config="steps: 2\n")
    page = (tmp_path / "report.html").read_text()
    for part in ("&lt;tag&gt;", "steps: 2", "1.5", "validation", "<svg"):
        assert part in page
    for part in ("<script", "src=", "href=", "http"):
        assert part not in page
    assert (tmp_path / "loss.png").stat().st_size > 5000


@pytest.mark.parametrize("count", [1, 2, 600, 601, 5000])
def test_a_long_curve_is_thinned_and_keeps_its_ends(count):
    """A page of a million points does not open; the last loss is the one that people look for."""
    steps = dict.fromkeys(("loss", "learning_rate", "grad_norm", "tokens_per_s"), range(count)) | {"step": range(count)}
    points = run_curves(steps, [])["Learning rate"][0].points
    assert points[0] == (0, 0)
    assert points[-1] == (count - 1, count - 1)
    assert min(count, 300) <= len(points) == len(set(points)) <= 601
