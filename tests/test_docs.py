"""Every command of README and docs, and every configuration, runs."""

import os
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.annotations import main as annotations
from nnxtrain.aot.__main__ import main as aot
from nnxtrain.cli.command import guarded
from nnxtrain.evaluate import main as evaluate
from nnxtrain.generate import main as generate
from nnxtrain.launch import main as launch
from nnxtrain.profiling.__main__ import main as profiling
from nnxtrain.train import main as train
from tests.support import ROOT
from tools.compare_training_engine import main as compare_training_engine
from tools.convert_checkpoint import main as convert_checkpoint
from tools.kill_test import main as kill_test
from tools.remat_table import main as remat_table

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yml"))
MODULES = {
    "aot": aot,
    "train": train,
    "generate": generate,
    "evaluate": evaluate,
    "launch": launch,
    "profiling": profiling,
}
TOOLS = {
    "annotations": annotations,
    "compare_training_engine": compare_training_engine,
    "convert_checkpoint": convert_checkpoint,
    "kill_test": kill_test,
    "remat_table": remat_table,
}
SIZED = {"compare_training_engine", "remat_table"}  # take keys of the configuration
SIZES = "model.layers=1 model.embed=32 model.heads=2 model.mlp=32 batch.sequence=32 batch.global_size=8"
SMALL = (
    f"{SIZES} steps=2 batch.accum_steps=1 eval.max_batches=1 eval.every_steps=0 generate.tokens=4 mesh.data=1".split()
)


def commands() -> list[str]:
    """Returns the lines of all shell blocks that start python, without what only a checkout needs."""
    blocks = [block for page in PAGES for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


def test_readme_names_the_commands_of_the_makefile():
    """A target that is gone must not stay in README."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"train", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Returns a folder with the configurations, a small corpus and a finished run named as in README."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "one.txt").write_text("a text of one's own\n" * 200)
    return folder


LONG = {
    "python tools/kill_test.py configs/tiny.yml rounds=1",  # three runs, one after the other
    "python -m nnxtrain.launch processes=2 devices_per_process=2 -- train configs/tiny.yml"
    " run_name=two mesh.data=2 mesh.fsdp=2",  # as in test_launch.py
    "python tools/remat_table.py configs/tiny.yml",  # as in tools/test_remat_table.py
    "python tools/compare_training_engine.py configs/tiny.yml suite=metrics types=float32 m_steps=2",
}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if line in LONG else [])
        for line in commands()
        if line.startswith(("python ", "touch "))
    ],
)
def test_commands_of_the_pages_run(line, workplace, monkeypatch):
    """Runs each command with a smaller model and fewer steps on top."""
    monkeypatch.chdir(workplace)
    program, *words = shlex.split(line)
    if program == "touch":
        Path(words[0]).touch()
        return
    if words[0] != "-m":
        tool = Path(words[0]).stem
        assert guarded(TOOLS[tool], [*words[1:], *(SIZES.split() if tool in SIZED else [])]) == 0
        return
    name, *words = words[1].removeprefix("nnxtrain."), *words[2:]
    asks = {"--help", "--list-keys", "--print-config", "--dry-run", "--show-schedule"} & set(words)
    if name in ("aot", "train", "launch") and not asks and "aot.lower_only=true" not in words:
        own = {word.partition("=")[0] for word in words}
        words += [word for word in SMALL if word.partition("=")[0] not in own]
        words.append(f"data.cache_dir={workplace}/cache")
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(variable, os.environ[variable])  # compile only changes them
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            MODULES[name](words)
    else:
        assert guarded(MODULES[name], words) == 0


def test_the_loop_of_the_engines_page_runs(workplace, monkeypatch, capsys):
    """The first thing that somebody with microbatches of their own copies."""
    monkeypatch.chdir(workplace)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(), re.DOTALL)
    exec(compile(block, "engine.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == str(3 * 4 * 32)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_configuration_is_possible(path, capsys):
    """Large ones are checked by arithmetic."""
    assert guarded(train, [str(path), "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_of_a_page_lead_somewhere(page):
    """A picture that is not there is the first thing that a reader sees."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / Path(target)).exists(), target
