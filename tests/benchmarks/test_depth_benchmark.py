"""The benchmark of depth runs, on a smaller model."""

import json

from benchmarks.depth import main
from nnxtrain.config.command import guarded


def test_the_report_has_both_depths_and_their_ratio(tmp_path, capsys):
    """One round; no time is judged here, but both programs are of one length."""
    report = tmp_path / "report.json"
    sizes = ["model.embed=32", "model.heads=2", "model.kv_heads=1", "model.mlp=32", "batch.sequence=8"]
    assert guarded(main, ["rounds=1", f"report={report}", *sizes]) == 0
    figures = json.loads(report.read_text())
    assert figures == json.loads(capsys.readouterr().out)
    assert figures["instructions"]["4"] == figures["instructions"]["64"] > 0
    for spread in (*figures["compile_s"].values(), figures["ratio"]):
        assert 0 < spread["p10"] <= spread["median"] <= spread["p90"]


def test_no_rounds_are_refused(capsys):
    """A median of nothing is not a number."""
    assert guarded(main, ["rounds=0"]) == 2
    assert "rounds=0" in capsys.readouterr().err
