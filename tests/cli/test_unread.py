"""What `evaluate` and `generate` do not read is said: a key without effect is a figure that is misread."""

import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.cli.unread import unread_words
from nnxtrain.config.load import load
from nnxtrain.config.record import to_yaml
from nnxtrain.evaluate import main as evaluate
from nnxtrain.generate import main as generate
from tests.support import TINY

COMMANDS = {"evaluate": evaluate, "generate": generate}
UNREAD = ("steps=5", "optimizer.name=lion", "schedule.warmup_steps=3", "checkpoint.resume=must", "model.dropout=0.5")
READ = {
    "evaluate": ("eval.max_batches=1", "batch.sequence=16", "data.shuffle=false", "mesh.data=1", "model.tied=false"),
    "generate": ("tokens=3", "generate.top_k=2", "batch.sequence=16", "data.tokenizer=byte", "model.tied=false"),
}
OTHERS = {
    "evaluate": ("generate.tokens=3", "run_name=x", "data.epochs=2"),
    "generate": ("eval.max_batches=1", "data.shuffle=false", "mesh.data=1", "batch.global_size=4"),
}


def noted(tmp_path, capsys, command: str, *words: str, run: tuple[str, ...] = ()) -> list[str]:
    """Returns the words that a command says have no effect on it; the run has saved nothing, so it ends there."""
    sizes = ("model.layers=1", "model.embed=16", "data.source=stdlib", "data.validation_fraction=0", "model.vocab=384")
    config = load(TINY, [*sizes, "mesh.data=1", f"data.cache_dir={tmp_path}", *run])
    (tmp_path / "config.yml").write_text(to_yaml(config))
    assert guarded(COMMANDS[command], [str(tmp_path), *words]) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " has no effect on " in line]
    assert all(line.startswith("note: ") and line.endswith(f" on python -m nnxtrain.{command}") for line in lines)
    return [line.split()[1] for line in lines]


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_of_the_command_line_that_a_command_does_not_read_are_said(tmp_path, capsys, monkeypatch, command):
    """`evaluate RUN optimizer.name=lion` printed the loss of the run as if lion had trained it."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    unread = [*UNREAD, *OTHERS[command]]
    got = noted(tmp_path, capsys, command, *READ[command], *unread, "debug.platform=tpu")
    assert got == unread


def test_keys_of_the_optimizer_are_read_where_it_averages_the_weights():
    """The averages are in its state: another rule, or none, is another model to evaluate."""
    words = ["optimizer.name=sgd"]
    for command in COMMANDS:
        for before, own in (
            ({"optimizer.name": "schedule_free_adamw"}, []),
            ({"optimizer.ema": 0.9}, []),
            ({}, ["optimizer.ema=0.9"]),
        ):
            assert not list(unread_words(words, load(TINY, [*words, *own]), before, command=command))
        assert len(list(unread_words(words, load(TINY, words), {}, command=command))) == 1
