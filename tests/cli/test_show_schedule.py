"""`--show-schedule`: what is printed is what a run would use."""

import numpy as np
import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.cli.show_schedule import HEIGHT, WIDTH, plot
from nnxtrain.config.record import to_yaml
from nnxtrain.optim.schedules import SCHEDULES, make_schedule
from nnxtrain.run.recompiles import CompileLog
from nnxtrain.train import main
from tests.support import TINY, tiny


def shown(capsys, *words: str) -> tuple[list[str], dict[int, float]]:
    """Returns the lines of the plot and the table, of `tiny.yml` with `words` on top."""
    capsys.readouterr()
    assert guarded(main, [str(TINY), *words, "--show-schedule"]) == 0
    plotted, _, table = capsys.readouterr().out.partition("\n\n")
    rows = [line.split() for line in table.splitlines()[1:]]
    return plotted.splitlines()[1:], {int(update): float(rate) for update, rate in rows}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_holds_the_rates_of_the_run(tmp_path, monkeypatch, capsys, name):
    """Another length, peak or warm-up than the run's would plan another run; nothing is compiled or written."""
    monkeypatch.chdir(tmp_path)
    log = CompileLog()
    words = (f"schedule.name={name}", "steps=200", "schedule.warmup_fraction=0.1", "optimizer.learning_rate=0.5")
    plotted, table = shown(capsys, *words)
    config = tiny(*words)
    schedule = make_schedule(config.schedule, peak=0.5, steps=200)
    assert {0, 20, 199} <= set(table)
    for update, rate in table.items():
        assert rate == pytest.approx(float(schedule(update)), rel=1e-6)
    assert table[20] == max(table.values()) == 0.5
    assert len(plotted) == HEIGHT + 1
    assert all(line.count("*") <= WIDTH for line in plotted)
    assert sum(line.count("*") for line in plotted) == WIDTH
    assert log.counts["jit(train_step)"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_runs_of_a_few_steps_are_shown(capsys, steps):
    """A plot of nothing divides by its largest value."""
    _, table = shown(capsys, f"steps={steps}")
    assert list(table) == list(range(steps))


def test_a_finished_run_can_be_looked_at(tmp_path, capsys):
    """The answer is the curve, not that there is nothing to do."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.yml").write_text(to_yaml(tiny("steps=2", f"output_dir={tmp_path}")))
    (folder / "summary.json").write_text('{"status": "done", "step": 2, "final_loss": 1.0}')
    words = (f"output_dir={tmp_path}", "steps=2")
    assert guarded(main, [str(TINY), *words]) == 0
    assert "is finished" in capsys.readouterr().out
    _, table = shown(capsys, *words)
    assert list(table) == [0, 1]


def test_a_column_is_the_highest_of_its_share():
    """The peak of a long run lasts one update and must not fall between two columns."""
    values = np.zeros(1000)
    values[503] = 1.0
    lines = plot(values)
    assert lines[0].count("*") == 1
    assert lines[HEIGHT - 1].count("*") == WIDTH - 1
