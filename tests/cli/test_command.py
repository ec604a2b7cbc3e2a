"""The command line as a user meets it: one message, exit code 2, nothing written, and no jax for questions."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nnxtrain import errors
from nnxtrain.cli.command import guarded
from nnxtrain.config.checks import LEAVES
from nnxtrain.config.load import load
from nnxtrain.config.record import to_yaml
from nnxtrain.evaluate import main as evaluate
from nnxtrain.generate import main as generate
from nnxtrain.host import platform
from nnxtrain.launch import main as launch
from nnxtrain.profiling.__main__ import main as profiling
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
    "nested without end": ("[" * 1500, ()),
    "section as key": ("model: llama2-7b\n", ()),
    "text for a float": ("optimizer: {learning_rate: fast}\n", ()),
    "nan": ("", ("optimizer.learning_rate=nan",)),
    "maybe": ("", ("model.scan_layers=maybe",)),
    "half a step": ("steps: 1.5\n", ()),
    "list for a number": ("steps: [1, 2]\n", ()),
    "out of range": ("", ("model.dropout=1",)),
    "not a choice": ("", ("optimizer.name=adam",)),
    "not a preset": ("model: {preset: llama9}\n", ()),
    "not implemented yet": ("", ("mesh.stage=2",)),
    "batch and accumulation": ("batch: {global_size: 6, accum_steps: 4}\n", ()),
    "group": ("", ("optimizer.groups=head/* decay",)),
    "heads": ("model: {heads: 4, kv_heads: 3}\n", ()),
    "width": ("model: {heads: 4, embed: 66}\n", ()),
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
def test_a_broken_configuration_ends_with_one_message_and_leaves_nothing(write, tmp_path, monkeypatch, capsys, kind):
    """Exit 2, and not even an empty folder (B01, B02, B03, B10)."""
    content, words = BROKEN[kind]
    write(content)
    monkeypatch.chdir(tmp_path)
    assert guarded(main, ["run.yml", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("error:") == 1
    assert "run.yml" in printed.err or "command line '" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yml"]


def test_a_refusal_comes_without_jax_and_without_a_traceback(write, tmp_path, trap):
    """As a process: the import of jax alone takes seconds."""
    write("stepz: 1\nmodel: {layers: x, kv_heads: 3}\n")
    ended = run_module("train", "run.yml", "optimizer.momentum=0.9", cwd=tmp_path, **trap)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: 4 problems")
    assert "Traceback" not in ended.stderr


def test_bytes_of_a_command_line_that_are_not_utf8_are_refused_in_one_line(tmp_path):
    """A name in Latin-1 under LC_ALL=C ended in a traceback (N18)."""
    command = [sys.executable, "-m", "nnxtrain.train", str(TINY), b"run_name=caf\xe9"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, timeout=100)
    assert ended.returncode == 2
    assert ended.stderr.decode("ascii").count("\n") == 1
    assert b"run_name: 'caf\\udce9' is not UTF-8 text" in ended.stderr


EMPTY = {
    "configuration": (main, ["", "steps=5"], "CONFIG.yml ''"),
    "--list-keys": (main, ["--list-keys", ""], "--list-keys ''"),
    "--list-keys=": (main, ["--list-keys="], "--list-keys ''"),
    "run to write from": (generate, [""], "RUN_DIR ''"),
    "run to evaluate": (evaluate, [""], "RUN_DIR ''"),
    "--html": (profiling, ["show", ".", "--html", ""], "--html ''"),
    "--html=": (profiling, ["compare", ".", ".", "--html="], "--html ''"),
    "traces": (profiling, ["show", ""], "DIR ''"),
    "traces to merge": (profiling, ["merge", ""], "DIR ''"),
    "word": (main, [str(TINY), ""], "command line ''"),
    "output_dir": (main, [str(TINY), "output_dir="], "output_dir: '' is empty"),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_word_names_nothing(tmp_path, monkeypatch, capsys, kind):
    """`--html ''` wrote no page and said nothing; an empty folder is this folder."""
    monkeypatch.chdir(tmp_path)
    start, words, says = EMPTY[kind]
    assert guarded(start, words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


ODD = ("\x1b[31mred", "x" * 5000, "a\nerror: b", "caf\udce9", "\u202eevil", "\x07")


@pytest.mark.parametrize("text", ODD, ids=ascii)
@pytest.mark.parametrize(
    ("start", "words"),
    [
        (main, ["{}"]),
        (main, ["{}=1"]),
        (main, [str(TINY), "{}"]),
        (main, [str(TINY), "run_name={}", "model.name={}"]),
        (main, [str(TINY), "--{}"]),
        (main, ["--list-keys", "{}"]),
        (generate, ["{}"]),
        (evaluate, ["{}"]),
        (profiling, ["show", "{}"]),
        (profiling, ["{}"]),
        (profiling, ["show", ".", "--top", "{}"]),
        (launch, ["{}", "--", "train"]),
        (launch, ["processes={}", "--", "train"]),
    ],
)
def test_odd_words_are_echoed_safely_by_every_command(tmp_path, monkeypatch, capsys, start, words, text):
    """Control characters of a word would reach the terminal, newlines forge messages, half a character is no text."""
    monkeypatch.chdir(tmp_path)
    try:
        code = guarded(start, [word.format(text) for word in words])
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2
    for line in capsys.readouterr().err.split("\n"):
        assert line.isprintable()
        assert len(line) < 1100
        assert not line.startswith("error: b")


def test_what_another_command_reads_is_said(capsys):
    """A file may serve two commands; a topology does nothing to a training, and whoever gives it should know."""
    words = [str(TINY), "aot.topology=cpu:8", "aot.lower_only=true", "--print-config"]
    assert guarded(main, words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "note: aot.lower_only=true has no effect here: it is read by python -m nnxtrain.aot",
        "note: aot.topology=cpu:8 has no effect here: it is read by python -m nnxtrain.aot",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("steps=20", "schedule.warmup_steps=20"), "schedule.warmup_steps: the warm-up of 20 updates"),
        (("steps=20", "schedule.warmup_steps=500"), "schedule.warmup_steps: the warm-up of 500 updates"),
        (("steps=7", "schedule.warmup_fraction=1"), "schedule.warmup_fraction: the warm-up of 7 updates"),
        (("steps=20", "schedule.warmup_steps=19"), None),
        (("steps=0", "schedule.warmup_steps=5"), None),
    ],
)
def test_a_warm_up_as_long_as_the_run_is_said_with_its_numbers(capsys, words, says):
    """Such a run never meets its learning rate; a short trial of a long run is a fair use, so it is not refused."""
    assert guarded(main, [str(TINY), *words, "--print-config"]) == 0
    printed = capsys.readouterr().err
    assert printed.count("\n") == (says is not None)
    if says:
        assert printed.startswith(f"note: {says} is not shorter than the run, {words[0]}: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a configuration file is required"),
        (("steps=5",), "the first argument must be a configuration file"),
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


@pytest.fixture
def finished(write, tmp_path):
    """Returns the directory of a run that says it is done, as far as the question whether it is reads it."""
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    config = load(TINY, [f"output_dir={tmp_path}/runs"])
    (folder / "config.yml").write_text(to_yaml(config))
    summary = {"status": "done", "step": config.steps, "final_loss": 1.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0\n", "seed: 0\nold_key: 3\nold_section: {a: 1}\n"),
        ("  qk_norm: false\n", "  qk_norm: false\n  gone: [a, b]\n"),
        ("  norm_eps: 1.0e-05\n", ""),
        ("name: adamw", "name: a_rule_that_is_gone"),
        ("steps: 20\n", "steps: twenty\n"),
        ("  momentum: 0.0  # filled in\n", "  momentum: 0.9\n"),
        ("seed: 0\n", "seed: 0\n{"),
    ],
)
def test_a_finished_run_of_another_version_is_finished(finished, tmp_path, capsys, old, new):
    """A renamed key made every old run a configuration error, exit 2."""
    file = finished / "config.yml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert guarded(main, [str(TINY), f"output_dir={tmp_path}/runs"]) == 0
    printed = capsys.readouterr()
    assert f"{finished} is finished: step 20" in printed.out
    assert printed.err == ""


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
    assert guarded(main, [str(LLAMA), "data.source=synthetic", "steps=10", "schedule.warmup_steps=1", "--dry-run"]) == 0
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
    assert f"the next valid value is {fits}" in message
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
    assert "'heads/*' matches no parameter; close matches: head/table" in capsys.readouterr().err
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
    monkeypatch.setattr(platform, "find_spec", lambda name: name)
    monkeypatch.setattr(platform, "DEVICES", tmp_path)
    platform.choose_platform(load(TINY, []))
    assert os.environ["JAX_PLATFORMS"] == chosen
