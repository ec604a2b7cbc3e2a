"""The recipes of `docs/clusters.md`, checked as far as that goes without a cluster."""

import os
import re
import shlex
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import yaml

from nnxtrain.config.load import load
from nnxtrain.launch import _free_port
from tests.support import ROOT, TINY, rows_of

PAGE = (ROOT / "docs" / "clusters.md").read_text()
SMALL = ("model.layers=1", "model.embed=32", "batch.sequence=16", "generate.tokens=1", "steps=2", "eval.max_batches=1")


def block(language: str, holds: str) -> str:
    """Returns the one block of a language that holds a text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if holds in text]
    return found


def config_of(command: str):
    """Returns the configuration that a shell command starts a run with."""
    words = shlex.split(command.replace("\\\n", " ").replace("$JOB_COMPLETION_INDEX", "3"))
    start = words.index("nnxtrain.train") + 1
    assert words[start - 3 : start - 1] == ["python", "-m"]
    return load(ROOT / words[start], words[start + 1 :])


def devices_of(config) -> int:
    """Returns the devices that a mesh of given sizes needs."""
    product = 1
    for size in config.mesh.sizes().values():
        assert size > 0
        product *= size
    return product


@pytest.fixture
def slurm(tmp_path) -> Path:
    """Returns the SLURM script as a file."""
    path = tmp_path / "train.sbatch"
    path.write_text(block("bash", "#SBATCH"))
    return path


def test_the_slurm_script_asks_for_what_its_mesh_needs(slurm):
    """A process too few, or a key that is gone, costs its reader a night in the queue."""
    subprocess.run(["bash", "-n", slurm], check=True)
    text = slurm.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("#SBATCH")
    config = config_of(re.search(r"^srun .*?[^\\]$", text, re.MULTILINE | re.DOTALL)[0])
    assert config.distributed.detect
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert devices_of(config) == int(options["nodes"]) * int(options["gpus-per-node"])
    assert options["signal"].startswith("TERM@")


@pytest.mark.parametrize(("code", "queued"), [(75, True), (0, False), (7, False)])
def test_the_slurm_job_queues_again_after_a_stop(slurm, tmp_path, code, queued):
    """75 says that the run was stopped and saved; any other code must not loop for ever."""
    for name, body in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    assert subprocess.run(["bash", slurm], env=env).returncode == code
    asked = tmp_path / "asked"
    assert asked.exists() is queued
    assert not queued or asked.read_text() == "requeue 17\n"


def test_the_jobset_names_its_coordinator_as_kubernetes_does():
    """JobSet names pods SET-JOB-REPLICA-INDEX, in the domain of the set."""
    jobset = yaml.safe_load(block("yaml", "JobSet"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert job["replicas"] == 1
    assert spec["parallelism"] == spec["completions"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    shell, flag, line = container["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    subprocess.run([shell, "-n", flag, line], check=True)
    assert line.startswith("exec ")  # so that SIGTERM reaches the run and not the shell
    config = config_of(line)
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert config.distributed.coordinator == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert config.distributed.processes == spec["completions"]
    assert devices_of(config) == spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_the_work_of_a_ray_worker_runs(tmp_path, monkeypatch):
    """Ray calls it in a thread, where no signal handler may be set; the rest of the recipe names what Ray has."""
    asked: dict[str, dict] = {}

    class Stub:
        """Stands for a class of Ray and keeps what it is given."""

        def __init__(self, *args, **kwargs):
            asked[type(self).__name__] = {"args": args} | kwargs

        def fit(self):
            """Stands for the cluster: runs the work in a thread of its own."""
            given = asked["JaxTrainer"]
            words = given["train_loop_config"]["words"]
            config = load(ROOT / words[0], words[1:])
            assert (config.mesh.fsdp, config.data.source) == (-1, "text")
            small = [str(TINY), *SMALL, "mesh.fsdp=8", f"output_dir={tmp_path}"]
            thread = threading.Thread(target=given["args"][0], args=({"words": small},))
            thread.start()
            thread.join()

    names = {"ray.train": ("FailureConfig", "RunConfig", "ScalingConfig"), "ray.train.v2.jax": ("JaxTrainer",)}
    for name in ("ray", "ray.train", "ray.train.v2", "ray.train.v2.jax"):
        module = types.ModuleType(name)
        for entry in names.get(name, ()):
            setattr(module, entry, type(entry, (Stub,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(block("python", "JaxTrainer"), "clusters.md", "exec"), {})
    assert len(rows_of(tmp_path / "tiny")) == 2
    assert set(asked["ScalingConfig"]) == {"args", "use_tpu", "num_workers", "topology", "accelerator_type"}


@pytest.mark.slow
def test_processes_find_each_other_as_slurm_tasks(tmp_path):
    """What SLURM tells its tasks, told to two processes here; jax makes a job of them."""
    command = [sys.executable, "-m", "nnxtrain.train", str(TINY), *SMALL, "mesh.fsdp=4", "distributed.detect=true"]
    flags = "--xla_force_host_platform_device_count=2"
    job = {"SLURM_JOB_ID": str(_free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    tasks = [
        subprocess.Popen(
            [*command, f"output_dir={tmp_path}"],
            env=os.environ
            | job
            | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
        )
        for index in range(2)
    ]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    assert len(rows_of(tmp_path / "tiny")) == 2
