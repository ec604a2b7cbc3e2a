"""The benchmark of annotations runs, and what it finds is far below what a run may pay."""

import json

from benchmarks.annotations import main
from nnxtrain.config.command import guarded


def test_annotations_cost_little(tmp_path, capsys):
    """The tenth of the rounds that was disturbed least; 20 microseconds a step are the bound."""
    report = tmp_path / "report.json"
    assert guarded(main, ["steps=500", "rounds=9", f"report={report}"]) == 0
    figures = json.loads(report.read_text())
    assert figures == json.loads(capsys.readouterr().out)
    assert 0 < figures["with_us"]["p10"] <= figures["with_us"]["median"]
    assert figures["price_us"]["p10"] < 20
