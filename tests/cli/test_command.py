"""The command line as a user meets it: one message, exit code 2, nothing written, and no jax for questions."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from nnxtrain import errors
from nnxtrain.cli import command
from nnxtrain.cli.command import guarded
from nnxtrain.config.checks import LEAVES
from nnxtrain.config.load import load
from nnxtrain.train import main
from tests.support import ROOT, TINY, run_module

LLAMA = ROOT / "configs" / "llama2-7b.yml"
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboardX", "rich", "matplotlib")
WAYS_IN = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in sorted((ROOT / "nnxtrain").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.fixture(scope="module")
def trap(tmp_path_factory) -> dict[str, str]:
    """Returns the environment of a process in which an import of a heavy package is an error."""
    folder = tmp_path_factory.mktemp("trap")
    for name in HEAVY:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


BROKEN = {
    "misspelt in the file": ("model:\n  layrs: 2\n", ()),
    "misspelt on the command line": ("", ("model.layrs=2",)),
    "nested key at top level": ("layers: 2\n", ()),
    "hyphen": ("model:\n  kv-heads: 2\n", ()),
    "name of MaxText": ("", ("remat_policy=full",)),
    "given twice": ("steps: 1\nsteps: 2\n", ()),
    "broken YAML": ("model: {layers: 2\n", ()),
    "tab": ("model:\n\tlayers: 2\n", ()),
    "two documents": ("steps: 1\n---\nsteps: 2\n", ()),
    "list at the top": ("- steps: 1\n", ()),
    "not UTF-8": (b"# caf\xe9\nsteps: 1\n", ()),
    "NUL in the file": (b"steps: \x00\n", ()),
    "nested without end": ("[" * 5000, ()),
    "section as key": ("model: llama2-7b\n", ()),
    "text for a float": ("optimizer: {learning_rate: fast}\n", ()),
    "nan": ("", ("optimizer.learning_rate=nan",)),
    "maybe": ("", ("model.scan_layers=maybe",)),
    "half a step": ("steps: 1.5\n", ()),
    "list for a number": ("steps: [1, 2]\n", ()),
    "out of range": ("", ("model.dropout=1",)),
    "not a choice": ("", ("optimizer.name=adam",)),
    "not a preset": ("model: {preset: llama9}\n", ()),
    "not built yet": ("", ("mesh.stage=2",)),
    "batch and accumulation": ("batch: {global_size: 6, accum_steps: 4}\n", ()),
    "group": ("", ("optimizer.groups=head/* decay",)),
    "heads": ("model: {heads: 4, kv_heads: 3}\n", ()),
    "width": ("model: {heads: 4, embed: 66}\n", ()),
    "vocabulary": ("model: {vocab: 100}\n", ()),
    "chunks": ("", ("loss.chunks=7",)),
    "no text": ("data: {source: text}\n", ()),
    "run name": ("", ("run_name=../elsewhere",)),
    "NUL in a path": ('output_dir: "a\\0b"\n', ()),
    "word without =": ("", ("steps",)),
    "second file": ("", ("other.yml",)),
    "rows and devices": ("batch: {global_size: 6}\nmesh: {data: 4}\n", ()),
    "many": ("stepz: 1\nmodel: {layers: x}\n", ("optimizer.name=adam",)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_configuration_ends_with_one_message_and_leaves_nothing(write, tmp_path, trap, kind):
    """No traceback, exit 2, before jax is imported, and not even an empty folder (B01, B02, B03, B10)."""
    content, words = BROKEN[kind]
    write(content)
    ended = run_module("train", "run.yml", *words, cwd=tmp_path, **trap)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("error:") == 1
    assert "run.yml" in ended.stderr or "command line '" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a configuration file is missing"),
        (("steps=5",), "the first word must be a configuration file"),
        (("nowhere.yml",), "nowhere.yml: cannot be read: no such file or directory"),
        ((".",), "cannot be read: is a directory"),
        (("--list-keys", "nothing"), "no key starts with 'nothing'"),
        ((str(TINY), "checkpoint.resume=never", "run_name=" + "x" * 300), "run_name"),
    ],
)
def test_words_that_name_no_configuration_are_refused(tmp_path, monkeypatch, capsys, words, message):
    """One message that says what to write, and nothing in the folder."""
    monkeypatch.chdir(tmp_path)
    assert guarded(main, words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("--steps=5",), ("--steps", "5"), ("-n",), ("--dry-ru",), ("--print-config=1",)])
def test_a_flag_that_does_not_exist_is_refused(tmp_path, monkeypatch, capsys, words):
    """Abbreviations too: a flag that is added later would change what they mean."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        guarded(main, [str(TINY), *words])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("error:") == 1
    assert words[0].partition("=")[0] in printed
    assert list(tmp_path.iterdir()) == []


def test_a_key_with_dashes_is_answered_with_the_way_to_write_it(capsys):
    """Most programs want `--steps=5`."""
    with pytest.raises(SystemExit):
        guarded(main, [str(TINY), "--steps=5"])
    assert "steps=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--help",), ("--list-keys",), (str(TINY), "--print-config", "steps=5")])
def test_questions_are_answered_without_jax(tmp_path, trap, words):
    """An import of jax makes `--help` take seconds."""
    ended = run_module("train", *words, cwd=tmp_path, **trap)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_trap_for_jax_works(tmp_path, trap):
    """The tests above prove nothing if a run could pass."""
    ended = run_module("train", str(TINY), cwd=tmp_path, **trap)
    assert ended.returncode == 1
    assert re.search(r"RuntimeError: \w+ was imported", ended.stderr)


@pytest.mark.parametrize(
    "words",
    [
        (str(TINY), "steps=5", "seed=3", "--print-config"),
        ("--print-config", str(TINY), "steps=5", "seed=3"),
        (str(TINY), "--print-config", "steps=5", "seed=3"),
        (str(TINY), "steps=5", "--print-config", "seed=3"),
    ],
)
def test_flags_may_stand_anywhere(capsys, words):
    """The parser of Python alone loses words that follow a flag."""
    assert guarded(main, words) == 0
    printed = capsys.readouterr().out
    assert "steps: 5\nseed: 3\n" in printed


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.preset=gpt2-124m-like", "model.layers=2"),
        ("generate.prompt=say \"hi\": 'x'\n\n# no comment",),
        ("data.source=text", "data.path=[a b.txt,*.jsonl]", "data.validation_path=books=b/*.txt"),
        ("optimizer.eps=1e-30", "optimizer.clip_norm=null", "model.norm_eps=1e-5"),
    ],
)
def test_a_printed_configuration_is_the_same_configuration(write, capsys, words):
    """What is printed must start the very same run, from another folder and under another file name."""
    path = write((ROOT / "configs" / "quickstart.yml").read_text(), "first.yml")
    assert guarded(main, [str(path), *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert load(write(printed, "second.yml")) == load(path, words)
    assert guarded(main, [str(write(printed, "third.yml")), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("text", ["False", "false", "0"])
def test_a_switch_that_is_off_is_printed_as_false(capsys, text):
    """The resolved configuration shows a boolean, not a string (B02)."""
    assert guarded(main, [str(TINY), f"model.scan_layers={text}", "--print-config"]) == 0
    assert "  scan_layers: false\n" in capsys.readouterr().out


def test_help_names_every_way_in_and_every_exit_code(capsys):
    """A module that can be started and is not named is not found."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "nnxtrain.train" in WAYS_IN
    for way in WAYS_IN:
        assert f"python -m {way}" in printed
    for flag in ("--list-keys", "--print-config", "--dry-run", "--show-schedule", "key=val", "CONFIG.yml"):
        assert flag in printed
    codes = printed.partition("exit codes:")[2]
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert re.search(rf"\b{kind.exit_code} ", codes), kind


def test_files_that_help_names_are_there(capsys):
    """An example that cannot be copied is none."""
    with pytest.raises(SystemExit):
        main(["--help"])
    named = set(re.findall(r"configs/\S+\.yml", capsys.readouterr().out))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_every_key_is_listed_with_its_meaning(capsys):
    """One line a key: path, type, default, doc."""
    assert guarded(main, ["--list-keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(LEAVES)
    assert all(LEAVES[line.split()[0]].declared.metadata["doc"] in line for line in lines)
    assert guarded(main, ["--list-keys", "optimizer"]) == 0
    assert all(line.startswith("optimizer.") for line in capsys.readouterr().out.splitlines())


def test_a_dry_run_counts_what_a_run_would_hold(tmp_path, monkeypatch, capsys):
    """Llama 2 7B: 6.74 billion weights in float32 and two moments each, 12 bytes a weight; nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert guarded(main, [str(LLAMA), "data.source=synthetic", "steps=10", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "6.74 B" in printed.out
    assert "6,738,415,616" in printed.out
    assert re.search(rf"state per device +{12 * 6_738_415_616 / 2**30:.2f} GiB", printed.out)
    assert "2,097,152 (512 rows of 4096)" in printed.out
    assert "20,971,520 in 10 steps" in printed.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_reports_a_mesh_that_is_larger_than_the_machine(tmp_path, monkeypatch, capsys):
    """A run for a cluster is checked on a laptop."""
    monkeypatch.chdir(tmp_path)
    assert guarded(main, [str(TINY), "mesh.data=64", "batch.global_size=64", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "mesh.data=64 needs 64 devices" in printed
    assert "parameters" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "numbers", "key", "fits"),
    [
        (("mesh.data=4", "batch.global_size=6"), ("6", "4"), "batch.global_size", 8),
        (("mesh.data=8", "batch.global_size=4"), ("4", "8"), "batch.global_size", 8),
        (("mesh.data=4", "batch.global_size=12", "batch.accum_steps=2"), ("12", "2", "4"), "batch.global_size", 16),
        (("mesh.data=64", "batch.global_size=6"), ("6", "64"), "batch.global_size", 64),
        (("mesh.data=4", "eval.global_size=6"), ("6", "4"), "eval.global_size", 8),
    ],
)
def test_rows_that_cannot_be_cut_over_the_mesh_are_refused(
    tmp_path, monkeypatch, capsys, words, numbers, key, fits, flag
):
    """Also where the mesh is larger than this machine: no machine can run it (B10)."""
    monkeypatch.chdir(tmp_path)
    assert guarded(main, [str(TINY), *words, *flag]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert key in message
    assert all(re.search(rf"\b{number}\b", message) for number in numbers)
    assert f"the next that fits is {fits}" in message
    assert guarded(main, [str(TINY), *words, f"{key}={fits}", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_that_matches_nothing_is_a_configuration_error(tmp_path, monkeypatch, capsys):
    """Exit 2, not 5, and no folder of a run that never was."""
    monkeypatch.chdir(tmp_path)
    words = ("data.source=text", "data.path=nowhere/*.txt", "model.vocab=384", f"data.cache_dir={tmp_path}/cache")
    assert guarded(main, [str(TINY), *words, "debug.compilation_cache=null"]) == 2
    assert "nowhere/*.txt" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
def test_a_group_that_matches_no_parameter_is_a_configuration_error(tmp_path, monkeypatch, capsys, flag):
    """Refused with the paths that are near, before a run directory is made."""
    monkeypatch.chdir(tmp_path)
    assert guarded(main, [str(TINY), "optimizer.groups=heads/* freeze", "debug.compilation_cache=null", *flag]) == 2
    assert "'heads/*' matches no parameter; near are head/table" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_platform_that_is_not_here_is_refused(tmp_path, platform):
    """The error of jax itself comes with a traceback and does not know the key."""
    if Path("/dev/nvidia0").exists() if platform == "gpu" else importlib.util.find_spec("libtpu"):
        pytest.skip("this machine may have the device")
    ended = run_module("train", str(TINY), f"debug.platform={platform}", cwd=tmp_path)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "debug.platform" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "chosen"), [(None, "cpu"), ("nvidia0", ""), ("accel0", ""), ("vfio/0", ""), ("kfd", ""), ("null", "cpu")]
)
def test_a_compiler_of_tpus_decides_only_where_there_is_no_accelerator(device, chosen, tmp_path, monkeypatch):
    """With libtpu beside its GPU a machine would train on its processor, and say nothing."""
    if device:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "DEVICES", tmp_path)
    command.choose_platform(load(TINY, []))
    assert os.environ["JAX_PLATFORMS"] == chosen
