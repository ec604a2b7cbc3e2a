"""The benchmark of saves runs, on a smaller state."""

import json

from benchmarks.checkpoint import main
from nnxtrain.cli.command import guarded


def test_the_report_has_every_figure_with_its_spread(tmp_path, capsys):
    """Three rounds; no figure is judged here."""
    report = tmp_path / "report.json"
    words = ["rounds=3", f"report={report}", "model.layers=1", "model.embed=64", "model.heads=2", "model.kv_heads=2"]
    assert guarded(main, words) == 0
    figures = json.loads(report.read_text())
    assert figures == json.loads(capsys.readouterr().out)
    assert figures["rounds"] == 3
    for name in ("step_s", "held_s", "written_s"):
        assert 0 < figures[name]["p10"] <= figures[name]["median"] <= figures[name]["p90"]
