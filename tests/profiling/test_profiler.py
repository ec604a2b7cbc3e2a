"""Real traces of steps that are one product of matrices: borders, endings, faults, requests."""

import contextlib
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxtrain.config.profile import ProfileConfig
from nnxtrain.loops.train_loop import run_loop
from nnxtrain.profiling.profiler import ON_DEMAND, Profiler
from nnxtrain.profiling.session import Place
from nnxtrain.profiling.trace import digest_of, trace_files


class Engine:
    """Multiplies a matrix; its metrics do not wait for that."""

    def __init__(self) -> None:
        self.x = jnp.eye(512)
        self.multiply = jax.jit(lambda x: x @ x @ x @ x @ x @ x)
        self.multiply(self.x)

    def step(self, batch):
        """Starts a step."""
        self.x = self.multiply(self.x)
        return {"loss": np.float32(0)}

    def drain(self) -> None:
        """Waits for all steps."""
        self.x.block_until_ready()


class Run:
    """A run directory, and the loop over a profiler as a run has it.

    Attributes:
        said: lines for people.
        infos: what `on_trace_ready` got.
        traced: steps, counted from 0, that were recorded while a tracer was on.
        before: called with the number of each step before its batch.
    """

    def __init__(self, folder, config: ProfileConfig, *, process: int = 0):
        self.folder = folder
        self.said: list[str] = []
        self.infos: list = []
        self.traced: list[int] = []
        self.before = lambda step: None
        self.engine = Engine()
        self.profiler = Profiler(
            config,
            Place(folder / "profile", process),
            drain=self.engine.drain,
            say=self.said.append,
            alive=lambda: None,
            on_trace_ready=self.infos.append,
        )

    def take(self, steps: int, *, done: int = 0) -> None:
        """Takes steps up to `steps`, of which `done` are behind."""

        def batches():
            for step in range(done, steps):
                self.before(step)
                yield {}, None

        def between(done: int):
            turns = self.profiler.turns()

            def due() -> None:
                self.profiler.leave()
                if done < steps:
                    self.profiler.enter()

            return due if turns else None

        def record(record) -> None:
            if self.profiler.is_tracing:
                self.traced.append(record.step - 1)

        with self.profiler.steps(done):
            run_loop(
                self.engine,
                batches(),
                steps=range(done, steps + 5),  # the data ends first
                record=record,
                between=between,
                stops=lambda done: False,
            )

    @property
    def windows(self) -> list[str]:
        """Names of the folders below `profile/`."""
        folder = self.folder / "profile"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def digest(self, window: str, process: str = "process_0000"):
        """Returns the figures of a trace."""
        (file,) = trace_files(self.folder / "profile" / window / process)
        return digest_of(file)


@pytest.fixture
def run(tmp_path):
    """Returns `(skip_first, wait, warmup, active, repeat) -> Run`."""
    names = ("skip_first", "wait", "warmup", "active", "repeat")
    return lambda *numbers, **keys: Run(
        tmp_path, ProfileConfig(enabled=True, **dict(zip(names, numbers, strict=True)), **keys)
    )


def steps_in(digest) -> list[int]:
    """Returns the numbers of the steps in a trace."""
    return [step.step for step in digest.steps]


def test_windows_without_a_gap_are_traces_of_their_own(run):
    """Case 3: within one second jax would give all of them one name, and one would survive."""
    three = run(0, 0, 0, 2, 0)
    three.take(6)
    assert three.windows == ["step_00000000", "step_00000002", "step_00000004"]
    assert [steps_in(three.digest(window)) for window in three.windows] == [[0, 1], [2, 3], [4, 5]]
    assert [(info.cycle, info.first_step, info.last_step, info.partial) for info in three.infos] == [
        (0, 0, 1, False),
        (1, 2, 3, False),
        (2, 4, 5, False),
    ]
    sessions = [path.parent.name for path in trace_files(three.folder / "profile")]
    assert sessions == three.windows


def test_the_trace_of_a_first_step_holds_its_compilation(run):
    """Case 2: a window of one step, which is its first and its last."""
    one = run(0, 0, 0, 1, 1)
    compiled = jax.jit(lambda x: jnp.cos(x) @ x)
    one.before = lambda step: compiled(one.engine.x)
    one.take(3)
    assert one.windows == ["step_00000000"]
    events = [event.name for plane in one.infos[0].profile_data.planes for line in plane.lines for event in line.events]
    assert any("ompile" in name for name in events)


def test_a_window_that_the_end_cuts_is_partial(run):
    """Case 4: manifest and hook say so; a window that is whole does not."""
    cut = run(1, 0, 0, 2, 0)
    cut.take(6)
    assert cut.windows == ["step_00000001", "step_00000003", "step_00000005"]
    manifests = [json.loads((cut.folder / "profile" / name / "manifest.json").read_text()) for name in cut.windows]
    assert [manifest["partial"] for manifest in manifests] == [False, False, True]
    assert [info.partial for info in cut.infos] == [False, False, True]
    assert manifests[2]["first_step"] == manifests[2]["last_step"] == 5
    assert manifests[0]["schedule"]["active"] == 2


def test_a_resumed_run_counts_from_its_start_and_warms_up_without_a_file(run):
    """Case 5: names are those of the run's steps; step 1001 is traced and thrown away."""
    resumed = run(1, 0, 1, 2, 1)
    seen = []
    resumed.before = lambda step: seen.append((step, resumed.profiler.is_tracing, resumed.windows))
    resumed.take(1008, done=1000)
    assert resumed.windows == ["step_00001002"]
    assert steps_in(resumed.digest("step_00001002")) == [1002, 1003]
    assert resumed.traced == [1001, 1002, 1003]
    assert seen[1] == (1001, True, [])


def test_a_second_pass_over_a_step_gets_a_folder_of_its_own(run):
    """What is written is never overwritten."""
    for _ in range(2):
        run(1, 0, 0, 1, 1).take(3)
    names = ["step_00000001", "step_00000001.1"]
    again = run(1, 0, 0, 1, 1)
    assert again.windows == names
    assert steps_in(again.digest(names[1])) == [1]


def test_an_exception_ends_the_window_and_stays_the_exception(run):
    """Case 7: the trace holds the steps up to it, and nothing is left open."""
    broken = run(0, 0, 0, 5, 1)
    error = KeyError("of the data")

    def fail(step: int) -> None:
        if step == 2:
            raise error

    broken.before = fail
    with pytest.raises(KeyError) as caught:
        broken.take(9)
    assert caught.value is error
    assert [(info.first_step, info.last_step, info.partial) for info in broken.infos] == [(0, 2, True)]
    trains = [
        dict(event.stats)["step_num"]
        for plane in broken.infos[0].profile_data.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert trains == [0, 1, 2]
    broken.profiler.leave()
    assert not broken.profiler.is_tracing
    assert len(broken.infos) == 1


def test_an_end_while_it_warms_up_leaves_nothing(run, tmp_path, monkeypatch):
    """Case 8: no folder, here or elsewhere, and no hook; two steps later there is a partial window."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    short = run(0, 0, 2, 3, 1)
    short.take(2)
    assert short.traced == [0, 1]
    assert short.windows == []
    assert short.infos == []
    assert list((tmp_path / "temporary").iterdir()) == []
    longer = run(0, 0, 2, 3, 1)
    longer.take(4)
    assert [(info.first_step, info.last_step, info.partial) for info in longer.infos] == [(2, 3, True)]


def test_kernels_that_still_run_are_waited_for(run):
    """A trace that is stopped at once lacks the work of its last steps, without a word."""
    drained = run(1, 0, 0, 3, 1)
    drained.engine.x = jnp.eye(768)  # several hundred milliseconds a step
    drained.engine.multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))
    drained.engine.multiply(drained.engine.x).block_until_ready()
    drained.take(6)
    calls = {total.name: total.calls for total in drained.digest("step_00000001").operations}
    assert calls
    assert all(count % 3 == 0 for count in calls.values()), calls


def test_a_folder_that_cannot_be_written_costs_a_line(run):
    """Here a file stands where the folder should be; each later window would only repeat the line."""
    locked_out = run(1, 0, 0, 1, 0)
    (locked_out.folder / "profile").write_text("")
    locked_out.take(6)
    assert len(locked_out.said) == 1
    assert "the run continues without traces" in locked_out.said[0]
    assert locked_out.traced == []


def test_a_stop_that_fails_costs_a_line(run):
    """The folder of the trace turns into a file while the trace is taken, so that jax cannot write it."""
    failing = run(1, 0, 0, 2, 0)

    def replace(step: int) -> None:
        if step == 2:
            part = failing.folder / "profile" / "step_00000001" / ".process_0000.part"
            part.rmdir()
            part.write_text("")

    failing.before = replace
    failing.take(6)
    with contextlib.suppress(RuntimeError):  # jax 0.10 holds on to a trace that it could not write
        (failing.folder / "profile" / "step_00000001" / ".process_0000.part").unlink()
        jax.profiler.stop_trace()
    assert len(failing.said) == 1
    assert "from step 1 on cannot be written" in failing.said[0]
    assert failing.infos == []
    assert failing.traced == [1, 2]


def test_a_hook_that_raises_costs_a_line_each_time(run):
    """Tracing goes on, for the fault is not the tracer's."""
    hooked = run(0, 0, 0, 1, 2)
    hooked.profiler._on_trace_ready = lambda info: {}["missing"]
    hooked.take(4)
    assert [line for line in hooked.said if "on_trace_ready failed: 'missing'" in line] == hooked.said[1::2]
    assert len(hooked.said) == 4
    assert len(hooked.windows) == 2


def test_a_file_asks_for_a_window(tmp_path):
    """Nobody knows in advance when a run gets slow; no window was asked for here."""
    asked = Run(tmp_path, ProfileConfig(active=2))

    def touch(step: int) -> None:
        if step in (1, 7):
            (tmp_path / ON_DEMAND).touch()

    asked.before = touch
    asked.take(8)
    assert asked.windows == ["step_00000002"]
    assert steps_in(asked.digest("step_00000002")) == [2, 3]
    assert [(info.cycle, info.partial) for info in asked.infos] == [(None, False)]
    assert not (tmp_path / ON_DEMAND).exists()


def test_only_the_first_process_takes_a_request_up(tmp_path):
    """The others would race for the file, and some would trace and some would not."""
    (tmp_path / ON_DEMAND).touch()
    other = Run(tmp_path, ProfileConfig(), process=1)
    other.take(2)
    assert (tmp_path / ON_DEMAND).exists()
    assert other.windows == []


def test_a_file_inside_a_window_is_ignored(run):
    """Case 12: one line, and the window is what it would have been."""
    busy = run(1, 0, 0, 3, 1)

    def touch(step: int) -> None:
        if step == 2:
            (busy.folder / ON_DEMAND).touch()

    busy.before = touch
    busy.take(8)
    assert sum("is ignored: a window is open" in line for line in busy.said) == 1
    assert [(info.cycle, info.first_step, info.last_step) for info in busy.infos] == [(0, 1, 3)]


def test_memory_is_written_when_it_runs_out(run):
    """A real allocation that no machine can make; the error stays the error."""
    greedy = run(50, 0, 0, 1, 1)

    def allocate(step: int) -> None:
        if step == 3:
            jnp.zeros(2**46).block_until_ready()

    greedy.before = allocate
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        greedy.take(6)
    snapshot = greedy.folder / "profile" / "out_of_memory_00000003" / "process_0000" / "memory.pprof.gz"
    assert snapshot.read_bytes()[:2] == b"\x1f\x8b"
    assert str(snapshot) in greedy.said[0]


def test_memory_is_written_with_each_window_where_that_is_asked_for(run):
    """And never where it is not."""
    run(1, 0, 0, 1, 1, memory="each_window").take(3)
    run(1, 0, 0, 1, 1).take(3)
    found = sorted(path.parent.parent.name for path in run(1, 0, 0, 1, 1).folder.rglob("memory.pprof.gz"))
    assert found == ["step_00000001"]


def test_processes_write_side_by_side(run, tmp_path):
    """Case 10 in one process: the same run directory and window, two folders, each with its own events alone."""
    for process in (0, 1):
        one = Run(tmp_path, ProfileConfig(enabled=True, active=1, warmup=0), process=process)

        def mark(step: int, process=process) -> None:
            with jax.profiler.TraceAnnotation(f"marker_{process}"):
                pass

        one.before = mark
        one.take(3)
        names = {
            event.name for plane in one.infos[0].profile_data.planes for line in plane.lines for event in line.events
        }
        assert {name for name in names if name.startswith("marker")} == {f"marker_{process}"}
    assert one.windows == ["step_00000001"]
    window = tmp_path / "profile" / "step_00000001"
    assert sorted(path.name for path in window.iterdir()) == ["manifest.json", "process_0000", "process_0001"]


def test_a_process_that_was_not_asked_for_writes_nothing(tmp_path):
    """Traces of thousands of processes are too many."""
    other = Run(tmp_path, ProfileConfig(enabled=True, processes="first"), process=1)
    other.take(6)
    assert other.windows == []
    assert other.traced == []


def test_a_stage_has_a_name_of_its_own(tmp_path):
    """The folders of a pipeline: a process that owns one stage says which."""
    assert Place(tmp_path, 5, (2,)).name == "stage_02.process_0005"
    assert Place(tmp_path, 5, (2, 3)).name == Place(tmp_path, 5).name == "process_0005"


def test_a_port_that_is_taken_costs_a_line(tmp_path):
    """Two servers in one process stand for any port that cannot be opened."""
    jax.profiler.start_server(0)
    try:
        served = Run(tmp_path, ProfileConfig(server_port=9))
        served.take(2)
    finally:
        jax.profiler.stop_server()
    assert len(served.said) == 1
    assert "profile.server_port=9 cannot be opened" in served.said[0]
