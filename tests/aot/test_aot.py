"""Compile only: what is compiled is what trains, and what is said of it is true."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import pytest
from flax import nnx

from nnxtrain.aot.__main__ import main as aot
from nnxtrain.aot.programs import BY_WEIGHT, compile_ahead, suggestions
from nnxtrain.aot.report import Roofline
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.models.remat import REMAT_POLICIES
from nnxtrain.train import main as train
from tests.support import ROOT, TINY, rows_of, tiny
from tests.tools.test_remat_table import KEPT

SMALL = ("model.layers=1", "model.embed=32", "batch.sequence=16")
tpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'nnxtrain[tpu]'")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Keeps what the entry point says to jax from the tests after it."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, os.environ[name])


def report_of(*words: str, topology: str = "cpu:8"):
    """Returns the report of `tiny.yml` with `words` on top."""
    return compile_ahead(tiny(f"aot.topology={topology}", *words), BUILT_IN, say=lambda line: None)


def test_a_report_is_complete(tmp_path, capsys):
    """Exit 0, every figure, and the bytes of the state in as many pieces as there are devices."""
    file = tmp_path / "report.json"
    words = ("aot.topology=cpu:8", "mesh.fsdp=8", f"aot.report={file}", f"aot.dump_hlo={tmp_path / 'hlo'}")
    assert guarded(aot, [str(TINY), *words]) == 0
    assert "aot.hbm_gib names it" in capsys.readouterr().out
    found = json.loads(file.read_text())
    step, evaluation = found["programs"]
    assert (step["name"], evaluation["name"]) == ("train_step", "eval_step")
    state = nnx.eval_shape(make_program(tiny("mesh.data=1"), devices=jax.devices()[:1]).make_state)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state((state.model, state.optimizer))))
    assert found["state_bytes"] == pytest.approx(whole / 8, rel=0.05)
    assert step["memory"]["arguments"] == pytest.approx(whole / 8, rel=0.05)
    assert step["memory"]["aliased"] == pytest.approx(whole / 8, rel=0.05)
    assert sum(found["owners"][name] for name in ("parameters", "optimizer")) == found["state_bytes"]
    gathers = [total for total in step["collectives"] if total["kind"] == "all-gather"]
    assert [total["axes"] for total in gathers] == [["fsdp"]]
    assert gathers[0]["count"] > 4 * 7  # each of four layers gathers its weights, forward and backward
    forms = {
        f"{name}.{form}.txt" for name in ("train_step", "eval_step") for form in ("jaxpr", "stablehlo", "optimised")
    }
    assert {path.name for path in (tmp_path / "hlo").iterdir()} == forms


@pytest.mark.parametrize("engine", ["single", "split"])
def test_what_is_compiled_is_what_trains(engine, tmp_path):
    """A report of another program is worth nothing."""
    report = tmp_path / "report.json"
    words = (*SMALL, "mesh.fsdp=8", "eval.global_size=8", f"engine.name={engine}")
    aot_words = ("aot.topology=cpu:8", "aot.lower_only=true", f"aot.report={report}")
    assert guarded(aot, [str(TINY), *words, *aot_words]) == 0
    assert guarded(train, [str(TINY), *words, "steps=2", f"output_dir={tmp_path}"]) == 0
    trained = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert trained["hlo_hash"] != json.loads(report.read_text())["hlo_hash"], "steps are in the program"
    assert guarded(aot, [str(TINY), *words, *aot_words, "steps=2"]) == 0
    assert trained["hlo_hash"] == json.loads(report.read_text())["hlo_hash"]


@pytest.mark.parametrize("preset", ["llama2-7b", "llama3-8b", "gpt2-124m-like"])
def test_the_formula_counts_the_products_of_the_program(preset):
    """Three times the forward pass, with the half of the attention that a causal mask needs."""
    words = ("data.source=synthetic", "model.layers=2", "model.attention=dot_product", "aot.topology=cpu:1")
    sizes = ("batch.global_size=1", "batch.sequence=256", "eval.global_size=1", "aot.lower_only=true", "mesh.data=1")
    config = load(ROOT / "configs" / f"{preset}.yml", [*words, *sizes])
    report = compile_ahead(config, BUILT_IN, say=lambda line: None)
    forward = report.programs[-1].product_flops
    scores = 4 * 256 * 256 * config.model.heads * config.model.head_dim * config.model.layers
    assert report.programs[-1].name == "eval_step"
    assert report.model_flops == pytest.approx(3 * (forward - scores / 2), rel=1e-6)


def test_what_does_not_fit_is_told_with_what_would(capsys):
    """The exit code is for scripts, the words are for people."""
    words = ("aot.topology=cpu:2", "mesh.fsdp=2", "batch.global_size=64", "aot.hbm_gib=0.01")
    assert guarded(aot, [str(TINY), *words]) == 3
    out = capsys.readouterr().out
    assert "does not fit: peak" in out
    assert "batch.accum_steps=" in out
    assert "mesh.fsdp=" in out


def test_a_suggestion_fits():
    """Advice that does not help costs a person an evening."""
    words = ("mesh.fsdp=2", "batch.global_size=64", "aot.hbm_gib=0.02")
    refused = report_of(*words, topology="cpu:2")
    assert refused.fits is False
    accumulation = next(line for line in refused.suggestions if line.startswith("batch.accum_steps="))
    assert report_of(*words, accumulation, topology="cpu:2").fits


def test_programs_of_a_step_are_counted_as_often_as_they_run():
    """Moments stay while a microbatch runs; a step is all of its microbatches, and the update of them."""
    words = ("batch.global_size=16", "batch.accum_steps=4", "mesh.data=1", "eval.global_size=4")
    single, split = (report_of(*words, f"engine.name={name}", topology="cpu:1") for name in ("single", "split"))
    assert [(one.name, one.executions) for one in split.programs] == [("fwd_bwd", 4), ("update", 1), ("eval_step", 0)]
    work = sum(one.executions * one.product_flops for one in split.programs)
    assert work == pytest.approx(single.programs[0].product_flops, rel=1e-6)
    for one in (*split.programs, *single.programs):
        assert one.memory.peak >= single.state_bytes + one.memory.temporaries
    assert split.programs[0].memory.arguments < single.state_bytes < split.programs[0].memory.peak
    for report in (single, split):
        report.peak_flops = 1e12
        for one in report.programs:
            one.roofline = Roofline(one.product_flops / 1e12, 0.0, 0.0, "compute", one.product_flops / 1e12)
    assert split.step_s == pytest.approx(single.step_s, rel=1e-6)
    assert split.mfu_ceiling == pytest.approx(single.mfu_ceiling, rel=1e-6)
    assert 0.5 < single.mfu_ceiling <= 1


def test_a_lighter_policy_is_suggested():
    """Order and list are those of what a policy keeps; one that is not known is not answered with the heaviest."""
    kept = {policy: KEPT.get(policy, math.inf) for policy in BY_WEIGHT}
    assert sorted(BY_WEIGHT, key=lambda policy: kept[policy]) == list(BY_WEIGHT)
    there = {*REMAT_POLICIES, "none"}
    assert there - set(BY_WEIGHT) == {policy for policy in there if policy.endswith("_offload")}
    words = ("mesh.fsdp=2", "batch.global_size=64", "aot.hbm_gib=0.01", "aot.lower_only=true")
    for policy, lighter in (("projections", "mlp"), ("qkv", "attention"), ("full", None)):
        config = tiny(*words, "aot.topology=cpu:2", f"remat.policy={policy}")
        report = compile_ahead(config, BUILT_IN, say=lambda line: None)
        first = suggestions(config, report)[0]
        assert first == f"remat.policy={lighter}" if lighter else not first.startswith("remat")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "aot.topology is missing"),
        (("aot.topology=cpu:2", "aot.sweep= "), "names no KEY=VALUE,VALUE"),
        (("aot.topology=cpu:2", "aot.sweep=nonsense.key=1,2"), "no cell is possible"),
        (("aot.topology=cpu:2", "aot.save=x", "aot.lower_only=true"), "aot.lower_only=true compiles nothing"),
        (("aot.topology=cpu:2", "aot.save=x", "aot.sweep=seed=1,2"), "aot.sweep compiles many steps"),
        (("aot.topology=cpu:2", f"aot.report={ROOT}"), "is a folder"),
        (("aot.topology=cpu:2", f"aot.dump_hlo={TINY}"), "is a file"),
        (("aot.topology=v5:4x4",), "did you mean v5"),
        (("aot.topology=cpu:many",), "is not one of"),
        (("aot.topology=cpu:4", "mesh.fsdp=8"), "a multiple of 8 devices and 4 cpu devices are here"),
        (("aot.topology=cpu:4", "aot.sweep=remat.policy"), "must be KEY=VALUE,VALUE"),
        (("aot.topology=cpu:4", "aot.compiler_options=fast"), "must be NAME=VALUE"),
        ((*SMALL, "aot.topology=cpu:4", "aot.compiler_options=fast=1"), "No such compile option: 'fast'"),
        pytest.param(
            ("aot.topology=v5e:2x2",),
            "pip install 'nnxtrain[tpu]'",
            marks=pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compiler is here"),
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(words, what, capsys):
    """One message with the names that there are, before anything is compiled."""
    assert guarded(aot, [str(TINY), *words]) == 2
    assert what in capsys.readouterr().err


def test_a_grid_is_one_table_and_goes_on_from_its_report(tmp_path, capsys):
    """A cell that is impossible is a row; one that is there is not compiled again."""
    file = tmp_path / "grid.json"
    grid = "aot.sweep=batch.accum_steps=1,2,3 remat.policy=none,full"
    words = [str(TINY), *SMALL, "aot.topology=cpu:2", "aot.hbm_gib=1", grid, f"aot.report={file}"]
    assert guarded(aot, words) == 0
    out = capsys.readouterr().out
    assert "6/6  batch.accum_steps=3 remat.policy=full" in out
    assert "multiple of batch.accum_steps=3" in out
    cells = json.loads(file.read_text())["cells"]
    assert [cell["fits"] for cell in cells.values()] == [True, True, True, True, False, False]
    best = min((cell for cell in cells if cells[cell]["fits"]), key=lambda cell: cells[cell]["peak_bytes"])
    assert f"best  {best}" in out
    del cells["batch.accum_steps=1 remat.policy=full"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cells": cells}))
    assert guarded(aot, words) == 0
    tried = [line.split(", about")[0] for line in capsys.readouterr().out.splitlines() if "/6  " in line]
    impossible = ["5/6  batch.accum_steps=3 remat.policy=none", "6/6  batch.accum_steps=3 remat.policy=full"]
    assert tried == ["2/6  batch.accum_steps=1 remat.policy=full", *impossible]
    assert guarded(aot, [*words, "model.layers=2"]) == 2
    assert "another configuration; choose another file" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["single", "split"])
def test_a_saved_program_trains_and_is_refused_where_anything_differs(engine, tmp_path, capsys):
    """Another learning rate is in the program; without a mark of it the old one would train on."""
    file = tmp_path / "step.aot"
    words = [str(TINY), *SMALL, "steps=3", "batch.accum_steps=2", "eval.every_steps=2", f"engine.name={engine}"]
    assert guarded(aot, [*words, "mesh.data=1", "aot.topology=cpu:1", f"aot.save={file}"]) == 0
    words += ["mesh.data=1", f"output_dir={tmp_path}"]
    assert guarded(train, [*words, "run_name=compiled"]) == 0
    assert guarded(train, [*words, "run_name=loaded", f"aot.load={file}"]) == 0
    rows, again = ([row["loss"] for row in rows_of(tmp_path / name)] for name in ("compiled", "loaded"))
    assert again == rows
    assert rows_of(tmp_path / "loaded", "eval") == rows_of(tmp_path / "compiled", "eval")
    hashes = {json.loads((tmp_path / name / "summary.json").read_text())["hlo_hash"] for name in ("compiled", "loaded")}
    assert len(hashes) == 1
    capsys.readouterr()
    assert guarded(train, [*words, "run_name=other", f"aot.load={file}", "optimizer.learning_rate=2e-3"]) == 2
    assert "optimizer.learning_rate=0.001, and here it is 0.002" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    (tmp_path / "torn").write_bytes(file.read_bytes()[:100])
    (tmp_path / "noise").write_bytes(b"\x80\xff")
    for name in ("torn", "noise", "nothing"):
        assert guarded(train, [*words, "run_name=other", f"aot.load={tmp_path / name}"]) == 2
        assert "no compiled programs are there" in capsys.readouterr().err


def test_a_saved_program_of_another_source_is_refused(tmp_path, capsys):
    """Another corpus may bring another tokenizer, which no key of the step names."""
    file, corpus = tmp_path / "step.aot", tmp_path / "a.txt"
    corpus.write_text("text " * 400)
    words = [str(TINY), *SMALL, "model.vocab=512", "mesh.data=1"]
    own = (f"aot.save={file}", "aot.compiler_options=xla_cpu_enable_fast_math=true")
    assert guarded(aot, [*words, "aot.topology=cpu:1", *own]) == 0
    words += [f"output_dir={tmp_path}", f"aot.load={file}"]
    assert guarded(train, words) == 2
    assert "aot.compiler_options" in capsys.readouterr().err
    words += [own[1], "data.source=text", f"data.path={corpus}", f"data.cache_dir={tmp_path}"]
    assert guarded(train, words) == 2
    assert "holds another step" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def in_a_process(*words: str, timeout: int = 600):
    """Runs the entry point in a process of its own."""
    command = [sys.executable, "-m", "nnxtrain.aot", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout)


def test_help_answers():
    """The first thing that a user tries."""
    assert "exit codes" in in_a_process("--help").stdout


@tpu
@pytest.mark.tpu_smoke
def test_a_small_model_is_compiled_for_a_tpu(tmp_path):
    """The compiler of TPUs is there, and says nothing that nobody must act on."""
    report = tmp_path / "report.json"
    done = in_a_process(str(TINY), "aot.topology=v5e:2x2", "mesh.fsdp=4", f"aot.report={report}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert found["fits"]
    assert found["device_kind"] == "TPU v5 lite"
    step = found["programs"][0]
    assert step["roofline"]["binds"] in ("compute", "memory", "network")
    assert any(total["kind"] == "reduce-scatter" and total["axes"] == ["fsdp"] for total in step["collectives"])


@tpu
@pytest.mark.tpu_smoke
def test_a_compiler_of_tpus_does_not_make_training_look_for_one(tmp_path):
    """With libtpu and no TPU jax asks the network for a minute who it is."""
    words = ("configs/tiny.yml", *SMALL, "steps=1", f"output_dir={tmp_path}")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "nnxtrain.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@tpu
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "code"), [(16, 0), (1024, 3)])
def test_seven_billion_parameters_on_sixteen_chips(rows, code, tmp_path):
    """Within what the closest peer needs, 11.1 GB; a batch that is far too large is told so, with what would fit."""
    report = tmp_path / "report.json"
    sizes = (f"batch.global_size={rows}", "batch.sequence=2048", "mesh.fsdp=16", "data.source=synthetic")
    done = in_a_process("configs/llama2-7b.yml", "aot.topology=v5e:4x4", *sizes, f"aot.report={report}")
    assert done.returncode == code, done.stderr
    found = json.loads(report.read_text())
    if code:
        assert "batch.accum_steps=" in done.stdout
    else:
        memory = found["programs"][0]["memory"]
        assert memory["arguments"] + memory["temporaries"] < 11.1e9


@pytest.mark.slow
def test_eight_billion_parameters_are_lowered_without_being_held(tmp_path):
    """Nothing is allocated: the process stays far below the state, which is 96 GB."""
    code = "import resource, sys; from nnxtrain.aot import main; main(sys.argv[1:]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"  # noqa: E501
    words = ("configs/llama3-8b.yml", "data.source=synthetic", "aot.topology=cpu:16", "mesh.fsdp=16")
    command = [sys.executable, "-c", code, *words, "aot.lower_only=true"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 4e6
