"""The benchmark of annotations runs; what it finds is for people to judge, on a quiet machine."""

import json

from benchmarks.annotations import main
from nnxtrain.cli.command import guarded


def test_the_price_of_annotations_is_told_with_its_spread(tmp_path, capsys):
    """Every figure is there, on paper and in the file."""
    report = tmp_path / "report.json"
    assert guarded(main, ["steps=500", "rounds=9", f"report={report}"]) == 0
    figures = json.loads(report.read_text())
    assert figures == json.loads(capsys.readouterr().out)
    assert 0 < figures["with_us"]["p10"] <= figures["with_us"]["median"]
    assert figures["price_us"].keys() == {"median", "p10", "p90"}
