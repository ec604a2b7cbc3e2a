"""Compile only: what is compiled is what trains, and what is said of it is true."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnxtrain import tags
from nnxtrain.aot.__main__ import main as aot
from nnxtrain.aot.cost import Roofline, memory_of
from nnxtrain.aot.programs import compile_ahead
from nnxtrain.aot.remat import bytes_by_policy, lighter_than
from nnxtrain.aot.show import show, verdict
from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN
from nnxtrain.cli.command import guarded
from nnxtrain.config.load import load
from nnxtrain.engine.executable import Executables, serialize_executables
from nnxtrain.errors import UserError
from nnxtrain.models.remat import REMAT_POLICIES, by_tag
from nnxtrain.train import main as train
from tests.support import ROOT, TINY, rows_of, tiny

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
    assert "set aot.hbm_gib" in capsys.readouterr().out
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


def test_what_does_not_fit_is_refused_with_what_would(tmp_path, capsys):
    """The exit code is for scripts, the suggestions are for people; one that does not help costs an evening."""
    report = tmp_path / "report.json"
    words = ("mesh.fsdp=2", "batch.global_size=64", "aot.hbm_gib=0.02")
    assert guarded(aot, [str(TINY), *words, "aot.topology=cpu:2", f"aot.report={report}"]) == 3
    out = capsys.readouterr().out
    assert "does not fit: peak" in out
    policy, accumulation, mesh = json.loads(report.read_text())["suggestions"]
    assert all(f"try    {line}" in out for line in (policy, accumulation, mesh))
    assert (policy.split("=")[0], mesh.split("=")[0]) == ("remat.policy", "mesh.fsdp")
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
    """By what each keeps of this model, one from outside too; a list of names would know neither."""
    registry = BUILT_IN._replace(remat_policies=REMAT_POLICIES | {"gate": by_tag(save=[tags.MLP_GATE])})
    config = load(TINY, ["model.layers=1", "remat.policy=qkv_offload"])
    kept = bytes_by_policy(make_program(config, devices=jax.devices()[:1], registry=registry))
    assert kept.keys() == {*registry.remat_policies, "qkv_offload"} - {"projections_offload"}
    chain = ["projections", "mlp", "attention_layer", "gate", "qkv", "attention", "full", None]
    lighter = dict(itertools.pairwise(chain)) | {"qkv_offload": None}
    assert {policy: lighter_than(policy, kept) for policy in lighter} == lighter


def test_host_memory_is_reported_a_process_and_decides_too():
    """Offloaded activations of all devices of a process share the memory of its host; the device has room left."""
    report = report_of(*SMALL, "mesh.fsdp=8", "aot.hbm_gib=1", "aot.lower_only=true")
    stats = SimpleNamespace(
        argument_size_in_bytes=1, output_size_in_bytes=1, alias_size_in_bytes=1, temp_size_in_bytes=1,
        generated_code_size_in_bytes=0, peak_memory_in_bytes=5, host_argument_size_in_bytes=8,
        host_output_size_in_bytes=8, host_alias_size_in_bytes=8, host_temp_size_in_bytes=2**20,
        host_generated_code_size_in_bytes=0,
    )  # fmt: skip
    report.programs[0].memory = memory_of(stats, resident=0)
    assert (report.peak_bytes, report.host_bytes) == (5, 8 * (2**20 + 8))
    assert report.fits is None
    assert "host memory 8.00 MiB per process, of an unknown size; set aot.host_gib" in verdict(report)
    report.host_limit_bytes = 2**22
    assert report.fits is False
    assert verdict(report).startswith(
        "does not fit: peak 5 B of 1.00 GiB; host memory 8.00 MiB of 4.00 MiB per process"
    )
    report.host_limit_bytes = 2**24
    assert report.fits is True
    assert report.as_json()["host_bytes"] == report.host_bytes
    report.hbm_bytes = None
    assert report.fits is None


def test_a_kernel_of_unknown_flops_is_named(capsys):
    """A figure that silently leaves out the attention makes every step look bound by memory."""
    report = report_of(*SMALL, "mesh.fsdp=8", "aot.lower_only=true")
    report.programs[0].unknown_flops = ["splash"]
    report.programs[1].unknown_flops, report.programs[1].product_flops = ["splash"], 0
    show(report)
    shown = capsys.readouterr().out
    assert "unknown  FLOPs of the kernels splash" in shown
    row = next(line for line in shown.splitlines() if "matrix TFLOP" in line)
    assert row.count("unknown") == 2
    assert row.count("+") == 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "aot.topology is not set"),
        (("aot.topology=cpu:2", "aot.sweep= "), "contains no KEY=VALUE,VALUE"),
        (("aot.topology=cpu:2", "aot.sweep=nonsense.key=1,2"), "no cell is a valid configuration"),
        (("aot.topology=cpu:2", "aot.save=x", "aot.lower_only=true"), "aot.lower_only=true compiles nothing"),
        (("aot.topology=cpu:2", "aot.save=x", "aot.sweep=seed=1,2"), "aot.sweep compiles many steps"),
        (("aot.topology=cpu:2", f"aot.report={ROOT}"), "is a folder"),
        (("aot.topology=cpu:2", f"aot.dump_hlo={TINY}"), "is a file"),
        (("aot.topology=v5:4x4",), "did you mean v5"),
        (("aot.topology=cpu:many",), "is not one of"),
        (("aot.topology=cpu:4", "mesh.fsdp=8"), "a multiple of 8 devices, got 4 cpu devices"),
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


@pytest.mark.parametrize("error", [RuntimeError("INTERNAL: the compiler died"), UserError("libtpu cannot start")])
def test_a_failure_of_the_compiler_is_not_blamed_on_the_grid(error, monkeypatch, capsys):
    """Exit code 2 sends a person to the configuration; and a cell that failed may well fit."""

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr("nnxtrain.aot.sweep.compile_ahead", fails)
    assert guarded(aot, [str(TINY), "aot.topology=cpu:2", "aot.sweep=seed=1,2"]) == 1
    assert capsys.readouterr().err == f"error: no cell of the grid was compiled: {error}\n"


def test_a_grid_is_one_table_and_goes_on_from_its_report(tmp_path, capsys):
    """A cell that is impossible is a row; one that is there is not compiled again."""
    file = tmp_path / "grid.json"
    grid = "aot.sweep=batch.accum_steps=1,3 remat.policy=none,full"
    words = [str(TINY), *SMALL, "aot.topology=cpu:2", "aot.hbm_gib=1", grid, f"aot.report={file}"]
    assert guarded(aot, words) == 0
    out = capsys.readouterr().out
    assert "4/4  batch.accum_steps=3 remat.policy=full" in out
    assert "multiple of batch.accum_steps=3" in out
    cells = json.loads(file.read_text())["cells"]
    assert [cell["fits"] for cell in cells.values()] == [True, True, False, False]
    best = min((cell for cell in cells if cells[cell]["fits"]), key=lambda cell: cells[cell]["peak_bytes"])
    assert f"best  {best}" in out
    del cells["batch.accum_steps=1 remat.policy=full"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cells": cells}))
    assert guarded(aot, words) == 0
    tried = [line.split(", about")[0] for line in capsys.readouterr().out.splitlines() if "/4  " in line]
    impossible = ["3/4  batch.accum_steps=3 remat.policy=none", "4/4  batch.accum_steps=3 remat.policy=full"]
    assert tried == ["2/4  batch.accum_steps=1 remat.policy=full", *impossible]
    assert guarded(aot, [*words, "model.layers=2"]) == 2
    assert "another configuration; choose another file" in capsys.readouterr().err


SAVED = (str(TINY), *SMALL, "model.vocab=512", "steps=3", "batch.accum_steps=2", "eval.every_steps=2", "mesh.data=1")


@pytest.fixture(scope="module", params=["single", pytest.param("split", marks=pytest.mark.slow)])
def saved(request, tmp_path_factory, quick_compiles):
    """Returns the words of a run, the file of its compiled programs, and the report of them."""
    folder = tmp_path_factory.mktemp("saved")
    words, file, report = (*SAVED, f"engine.name={request.param}"), folder / "step.aot", folder / "report.json"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
            patch.setenv(name, os.environ[name])
        assert guarded(aot, [*words, "aot.topology=cpu:1", f"aot.save={file}", f"aot.report={report}"]) == 0
    return words, file, json.loads(report.read_text())


def test_a_saved_program_is_what_trains(saved, tmp_path, capsys):
    """A report of another program is worth nothing; nor is a program with an old learning rate in it."""
    words, file, report = saved
    words = (*words, f"output_dir={tmp_path}")
    assert guarded(train, [*words, "run_name=compiled"]) == 0
    assert guarded(train, [*words, "run_name=loaded", f"aot.load={file}"]) == 0
    rows, again = ([row["loss"] for row in rows_of(tmp_path / name)] for name in ("compiled", "loaded"))
    assert again == rows
    assert rows_of(tmp_path / "loaded", "eval") == rows_of(tmp_path / "compiled", "eval")
    summaries = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("compiled", "loaded"))
    assert {summary["hlo_hash"] for summary in summaries} == {report["hlo_hash"]}
    capsys.readouterr()
    assert guarded(train, [*words, "run_name=other", f"aot.load={file}", "optimizer.learning_rate=2e-3"]) == 2
    assert "optimizer.learning_rate=0.001, which is 0.002 now" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("saved", ["single"], indirect=True)
def test_a_saved_program_of_something_else_is_refused(saved, tmp_path, capsys):
    """Other options of the compiler, or another corpus with another tokenizer, which no key of the step names."""
    words, file, _ = saved
    words = [*words, f"output_dir={tmp_path}", f"aot.load={file}"]
    assert guarded(train, [*words, "aot.compiler_options=xla_cpu_enable_fast_math=true"]) == 2
    assert "aot.compiler_options" in capsys.readouterr().err
    corpus = tmp_path / "a.txt"
    corpus.write_text("text " * 400)
    assert guarded(train, [*words, "data.source=text", f"data.path={corpus}", f"data.cache_dir={tmp_path}"]) == 2
    assert "contains a different step" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_what_holds_no_program_is_refused(tmp_path, capsys):
    """A damaged file, one of something else, none at all, or a folder."""
    (tmp_path / "short").write_bytes(serialize_executables(Executables({}, ""), provenance={})[:-5])
    (tmp_path / "noise").write_bytes(b"\x80\xff")
    for name in ("short", "noise", "nothing", "."):
        assert guarded(train, [*SAVED, f"output_dir={tmp_path}", f"aot.load={tmp_path / name}"]) == 2
        assert "not a file of compiled programs" in capsys.readouterr().err


def test_training_compiles_with_the_options_of_the_compiler(tmp_path, capsys):
    """Options that `aot` alone takes make a report of a program that nobody trains; a wrong one is refused first."""
    words = (str(TINY), *SMALL, "mesh.data=1", f"output_dir={tmp_path}")
    assert guarded(train, [*words, "aot.compiler_options=fast=1"]) == 2
    assert "aot.compiler_options=fast=1: INVALID_ARGUMENT: No such compile option: 'fast'" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()
    config = load(TINY, [*words[1:-1], f"aot.compiler_options=xla_dump_to={tmp_path / 'dump'}"])
    program = make_program(config, devices=jax.devices()[:1])
    engine = program.make_engine()
    engine.initialise()
    evaluate = engine.bind_model(program.eval_step)
    evaluate(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), program.eval_spec()))
    dumped = " ".join(path.name for path in (tmp_path / "dump").iterdir())
    assert "train_step" in dumped
    assert "eval_step" in dumped


def start(*words: str) -> subprocess.Popen:
    """Starts the entry point in a process of its own."""
    command = [sys.executable, "-m", "nnxtrain.aot", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_help_answers():
    """The first thing that a user tries."""
    assert "exit codes" in start("--help").communicate(timeout=60)[0]


@tpu
@pytest.mark.tpu_smoke
def test_small_models_are_compiled_for_a_tpu_side_by_side(tmp_path):
    """Two at a time, which libtpu refuses by itself; no output that nobody must act on; bytes of the host are known."""
    words = ("aot.topology=v5e:2x2", "mesh.fsdp=4", "model.layers=1", "remat.policy=qkv_offload")
    files = [tmp_path / f"{number}.json" for number in range(2)]
    both = [start(str(TINY), *words, f"aot.report={file}") for file in files]
    ended = [(process.communicate(timeout=600)[1], process.returncode) for process in both]
    assert ended == [("", 0)] * 2
    one, other = (json.loads(file.read_text()) for file in files)
    assert one["hlo_hash"] == other["hlo_hash"]
    assert (one["device_kind"], one["fits"]) == ("TPU v5 lite", None), "the memory of the host is not known"
    step = one["programs"][0]
    assert one["host_bytes"] == 4 * step["memory"]["host"] > 0
    assert step["roofline"]["binds"] in ("compute", "memory", "network")
    assert any(total["kind"] == "reduce-scatter" and total["axes"] == ["fsdp"] for total in step["collectives"])


@pytest.mark.slow
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
    process = start("configs/llama2-7b.yml", "aot.topology=v5e:4x4", *sizes, f"aot.report={report}")
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    found = json.loads(report.read_text())
    if code:
        assert "batch.accum_steps=" in out
    else:
        memory = found["programs"][0]["memory"]
        assert memory["arguments"] + memory["temporaries"] < 11.1e9


@pytest.mark.slow
def test_eight_billion_parameters_are_lowered_without_being_held(tmp_path):
    """Nothing is allocated: the process stays far below the state, which is 96 GB."""
    code = "import resource, sys; from nnxtrain.aot.__main__ import main; main(sys.argv[1:]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"  # noqa: E501
    words = ("configs/llama3-8b.yml", "data.source=synthetic", "aot.topology=cpu:16", "mesh.fsdp=16")
    command = [sys.executable, "-c", code, *words, "aot.lower_only=true"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 4e6
