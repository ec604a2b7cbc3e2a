"""Figures of traces: of machines that are not here, of bytes that are no trace, and their tables."""

import gzip
import json

import pytest
from jax.profiler import ProfileData

from nnxtrain.cli.command import guarded
from nnxtrain.errors import DataError
from nnxtrain.profiling.__main__ import main
from nnxtrain.profiling.compare import changes
from nnxtrain.profiling.origins import Origin, origin_of
from nnxtrain.profiling.page import digest_tables, html_of, text_of
from nnxtrain.profiling.trace import Digest, Step, Total, digest_of

HOST = """
planes { name: "/host:CPU" lines { name: "python" timestamp_ns: 0
  events { metadata_id: 1 offset_ps: 1000000000 duration_ps: 4000000000 stats { metadata_id: 1 int64_value: 7 } }
  events { metadata_id: 2 offset_ps: 1000000000 duration_ps: 2000000000 }
  events { metadata_id: 1 offset_ps: 5000000000 duration_ps: 9000000000 stats { metadata_id: 1 int64_value: 8 } }
  events { metadata_id: 2 offset_ps: 5000000000 duration_ps: 1000000000 }
  events { metadata_id: 3 offset_ps: 6000000000 duration_ps: 7000000000 stats { metadata_id: 1 int64_value: 7 } }
  events { metadata_id: 3 offset_ps: 15000000000 duration_ps: 2000000000 stats { metadata_id: 1 int64_value: 8 } } }
  event_metadata { key: 1 value { id: 1 name: "train" } }
  event_metadata { key: 2 value { id: 2 name: "data_wait" } }
  event_metadata { key: 3 value { id: 3 name: "metrics_wait" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } } }
"""
TPU = """
planes { name: "/device:TPU:0"
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000000 } }
  lines { name: "XLA Ops"
    events { metadata_id: 2 offset_ps: 0 duration_ps: 9000000000 }
    events { metadata_id: 3 offset_ps: 0 duration_ps: 3000000000 }
    events { metadata_id: 3 offset_ps: 3000000000 duration_ps: 2000000000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_train_step(1)" } }
  event_metadata { key: 2 value { id: 2 name: "%while.3 = (s32[]) while(%tuple)" } }
  event_metadata { key: 3 value { id: 3 name: "%fusion.12 = f32[8,128]{1,0} fusion(f32[8] %p)" } } }
"""
GPU = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #7(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000000
      stats { metadata_id: 1 str_value: "fusion.12" } stats { metadata_id: 2 str_value: "jit_train_step" } }
    events { metadata_id: 2 offset_ps: 2000000000 duration_ps: 1000000000 } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } } }
"""


@pytest.fixture
def write(tmp_path):
    """Returns `(text of planes, window, process) -> folder of the window`, which writes a trace."""

    def write_trace(text: str, window: str = "step_00000007", process: str = "process_0000"):
        session = tmp_path / window / process / "plugins" / "profile" / window
        session.mkdir(parents=True)
        (session / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
        events = [{"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}}, {}]
        timeline = {"metadata": {}, "traceEvents": events}
        (session / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps(timeline).encode()))
        return tmp_path / window

    return write_trace


def digest(folder) -> Digest:
    """Returns the figures of the only trace of a window."""
    (file,) = folder.rglob("*.xplane.pb")
    return digest_of(file)


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own(write):
    """Its annotation is shorter: it ends when the step is on its way."""
    found = digest(write(HOST))
    assert found.steps == [Step(7, 12.0, 2.0), Step(8, 4.0, 1.0)]
    assert found.step_ms == 8.0
    assert found.data_wait_share == 3 / 16
    assert [(one.name, one.calls, one.ms) for one in found.annotations] == [
        ("train", 2, 13.0),
        ("metrics_wait", 2, 9.0),
        ("data_wait", 2, 3.0),
    ]


def test_a_trace_of_other_code_has_no_steps(write):
    """Its `train` has no number; all else is counted."""
    found = digest(write(HOST.replace("step_num", "epoch")))
    assert (found.steps, found.step_ms) == ([], None)
    assert len(found.annotations) == 3


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (TPU, Total("fusion.12", "", 2, 5.0)),
        (GPU, Total("fusion.12", "jit_train_step", 1, 2.0)),
    ],
    ids=["tpu", "gpu"],
)
def test_operations_of_a_device_are_counted_once(write, text, want):
    """Planes as a TPU and a GPU write them; a loop and a whole module would count what runs inside once more."""
    assert digest(write(HOST + text)).operations == [want]


@pytest.mark.parametrize(
    ("path", "part", "direction"),
    [
        ("jit(train_step)/optimizer/mul", "optimizer", ""),
        ("jit(step)/while/body/closed_call/accumulate/add", "accumulate", ""),
        ("jit(step)/jvp(embedding)/jit(_take)/gather", "embedding", "forward"),
        ("jit(step)/jvp()/while/body/closed_call/layer/mlp/bsd,df->bsf/dot_general", "layer/mlp", "forward"),
        ("jit(step)/transpose(jvp(loss))/mul", "loss", "backward"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/layer/norm/mul", "layer/norm", "recomputed"),
        ("jit(step)/jvp()/layer/attention/attend/vmap(BNTS,BSNH->BTNH)/dot", "layer/attention/attend", "forward"),
        ("jit(step)/jvp()/layer/mlp/transpose;layer/norm/mul", "layer/mlp", "forward"),
        ("jit(step)/jvp()/while/body/eval_jaxpr/eval_jaxpr/layer/mlp/mul", "layer/mlp", "forward"),
        ("jit(step)/mul", "", ""),
        ("", "", ""),
    ],
)
def test_a_path_tells_the_part(path, part, direction):
    """Wrappers of jax are no parts of a model."""
    assert origin_of(path) == Origin(part, direction)


def test_what_is_no_trace_is_refused(tmp_path, capsys):
    """Bad content is 5; a path that matches nothing is 2."""
    (tmp_path / "a.xplane.pb").write_bytes(b"\xff" * 40)
    with pytest.raises(DataError, match="is not a trace"):
        digest_of(tmp_path / "a.xplane.pb")
    assert guarded(main, ["show", str(tmp_path)]) == 5
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    assert guarded(main, ["show", str(tmp_path)]) == 5
    (tmp_path / "a.xplane.pb").unlink()
    (tmp_path / "a.xplane.pb").mkdir()
    assert guarded(main, ["show", str(tmp_path)]) == 2
    assert guarded(main, ["show", str(tmp_path / "missing")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_show_says_the_same_in_three_ways(write, tmp_path, capsys):
    """Text and page are made of the same tables, JSON of the same figures."""
    window = write(HOST + GPU)
    assert guarded(main, ["show", str(window), "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step_00000007/process_0000\n")
    for words in ("median step, ms 8.000", "time 18.8 %", "fusion.12 jit_train_step 1 2.000 100.0 %", "7 12.000 2.000"):
        assert words in " ".join(text.split()), words
    page = (tmp_path / "page.html").read_text()
    assert "fusion.12" in page
    assert "http" not in page
    assert "<script" not in page
    assert guarded(main, ["show", str(window), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step_ms"] == 8.0
    assert found["steps"][0] == {"step": 7, "ms": 12.0, "data_wait_ms": 2.0}


def test_a_name_cannot_break_the_page():
    """Operations have names with angle brackets."""
    tables = digest_tables(Digest([], [], [], [Total("<b>", "a & b", 1, 1.0)]))
    assert "<td>&lt;b&gt;</td><td>a &amp; b</td>" in html_of("<", [("<", tables)])
    assert "<b>" in text_of(tables)


def test_compare_lists_what_got_slower_first():
    """Times are per step, so that two windows of different lengths compare."""

    def of(steps: int, **ms: float) -> Digest:
        totals = [Total(name, "", steps, steps * value) for name, value in ms.items()]
        return Digest([Step(number, 10.0, 0.0) for number in range(steps)], [], [], totals)

    found = changes([of(2, fast=1.0, slow=1.0, gone=3.0)], [of(4, fast=0.5, slow=4.0, new=2.0)])
    rows = [(change.name, change.before, change.after) for change in found if change.kind == "operation"]
    assert rows == [("slow", 1.0, 4.0), ("new", 0.0, 2.0), ("fast", 1.0, 0.5), ("gone", 3.0, 0.0)]
    assert next(change for change in found if change.kind == "step").difference == 0


def test_compare_prints_both_kinds(write, capsys):
    """A faster device shows as a negative difference."""
    before, after = write(HOST + TPU), write(HOST, window="step_00000009")
    assert guarded(main, ["compare", str(before), str(after)]) == 0
    assert "fusion.12 2.500 0.000 -2.500 0.000" in " ".join(capsys.readouterr().out.split())
    assert guarded(main, ["compare", str(before), str(after), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"kind": "operation", "name": "fusion.12", "before": 2.5, "after": 0.0, "difference": -2.5} in rows


def test_merge_puts_processes_side_by_side(write, tmp_path, capsys):
    """Case 10: one session with a host for each process; it is made when asked for, and once more is the same."""
    for process in ("process_0000", "stage_02.process_0005"):
        window = write(HOST, process=process)
    assert not (window / "merged").exists()
    for _ in range(2):
        assert guarded(main, ["merge", str(tmp_path)]) == 0
    session = window / "merged" / "plugins" / "profile" / "step_00000007"
    names = ["process_0000.xplane.pb", "stage_02.process_0005.xplane.pb"]
    assert sorted(path.name for path in session.iterdir()) == names
    timeline = json.loads(gzip.decompress((window / "merged" / "perfetto.json.gz").read_bytes()))["traceEvents"]
    assert [(event["pid"], event["args"]["name"]) for event in timeline] == [
        (701, "process_0000 /host:CPU"),
        (10701, "stage_02.process_0005 /host:CPU"),
    ]
    capsys.readouterr()
    assert guarded(main, ["show", str(window), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_merge_names_a_damaged_timeline_and_leaves_nothing(write, tmp_path, capsys):
    """A copy that was cut, or another file of the same ending."""
    window = write(HOST, process="process_0000")
    (timeline,) = window.rglob("*.trace.json.gz")
    whole = timeline.read_bytes()
    for damaged in (whole[:-9], b"x", gzip.compress(b"{"), gzip.compress(b"{}")):
        timeline.write_bytes(damaged)
        assert guarded(main, ["merge", str(window)]) == 5
        assert f"{timeline.name} is not a timeline" in capsys.readouterr().err
        assert not list(window.glob("*merged*"))


def test_words_that_cannot_be_followed_are_refused(write, tmp_path, capsys):
    """One place to compare, no rows, a folder in the place of the page."""
    window = write(HOST, process="process_0000")
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(window)])
    assert guarded(main, ["show", str(window), "--top", "-5"]) == 2
    assert guarded(main, ["show", str(window), "--html", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err


def test_merge_refuses_a_trace_outside_a_window(tmp_path, capsys):
    """A copied file says nothing of its process."""
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    assert guarded(main, ["merge", str(tmp_path)]) == 2
    assert "process_0000" in capsys.readouterr().err
