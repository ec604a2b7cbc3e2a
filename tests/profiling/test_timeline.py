"""The exporter's silent cut of a timeline is seen and said."""

import gzip
import json

import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.config.profile import ProfileConfig
from nnxtrain.profiling import timeline
from nnxtrain.profiling.__main__ import main
from nnxtrain.profiling.session import Place, Session, TraceRequest
from nnxtrain.profiling.timeline import MOST_EVENTS, Timeline, read_timeline, truncation_text


def event(name: str, ts: float, **args) -> str:
    """Returns an event as jax's exporter writes it."""
    own = f',"args":{json.dumps(args, separators=(",", ":"))}' if args else ""
    return f'{{"ph":"X","pid":1,"tid":2,"ts":{ts},"dur":1.5,"name":"{name}"{own}}}'


def write(file, count: int, *, steps: int = 0):
    """Writes a timeline of `count` events, the first of which are steps."""
    first = [event("train", 10.0 * step, step_num=str(step)) for step in range(steps)]
    others = [event("eval", 5.5, step_num="77"), event("x", 1234567.0)]
    head = '{"displayTimeUnit":"ns","traceEvents":[{"ph":"M","pid":1,"name":"process_name","args":{"name":"h"}},'
    same = (event("x", 3.25) + ",") * (count - len(first) - len(others))
    file.write_bytes(gzip.compress((head + ",".join([*first, *others]) + "," + same + "{}]}").encode(), 1))
    return file


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Returns a timeline of as many events as the exporter writes at most."""
    return write(tmp_path_factory.mktemp("cut") / "host.trace.json.gz", MOST_EVENTS, steps=208)


def test_a_cut_is_seen_by_the_number_of_events(cut, tmp_path):
    """The exporter writes exactly so many and says nothing; one less is whole."""
    assert read_timeline(cut) == Timeline(MOST_EVENTS, True, 207, 1234.567)
    whole = write(tmp_path / "whole.trace.json.gz", 1000)
    assert read_timeline(whole) == Timeline(1000, False, None, 1234.567)
    assert truncation_text(read_timeline(cut)).startswith("ends in step 207: jax writes at most 1,000,000 events to it")
    assert truncation_text(read_timeline(whole)).startswith("ends after 1,235 ms: ")


@pytest.mark.parametrize("size", [64, 97, 1000])
def test_events_on_the_border_of_two_pieces_count_once(size, tmp_path, monkeypatch):
    """A piece that ends inside an event would lose it, or its step."""
    monkeypatch.setattr(timeline, "CHUNK_BYTES", size)
    assert read_timeline(write(tmp_path / "a.trace.json.gz", 50, steps=9)) == Timeline(50, False, 8, 1234.567)


def test_the_manifest_and_the_console_say_where_a_timeline_ends(tmp_path, monkeypatch, capsys):
    """Of 400 steps the viewer shows 208, and nothing else would say so; `merge` copies the cut and says it again."""
    monkeypatch.setattr(timeline, "MOST_EVENTS", 1000)
    said: list[str] = []
    session = Session(ProfileConfig(active=2), Place(tmp_path / "profile"), want=TraceRequest(True, cycle=0), step=5)
    session.stop()
    (written,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    write(written, 1000, steps=208)
    session.keep(2, say=said.append)
    assert [line for line in said if "ends in step 207" in line and "xplane.pb" in line]
    manifest = json.loads((tmp_path / "profile" / "step_00000005" / "manifest.json").read_text())
    assert manifest["timeline"] == {
        "file": written.name, "events": 1000, "is_cut": True, "last_step": 207, "end_ms": 1234.567
    }  # fmt: skip
    (kept,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    write(kept, 999)
    assert guarded(main, ["merge", str(tmp_path)]) == 0
    assert "ends" not in capsys.readouterr().out
    write(kept, 1000, steps=208)
    assert guarded(main, ["merge", str(tmp_path)]) == 0
    assert "ends in step 207" in capsys.readouterr().out


def test_a_timeline_that_cannot_be_read_costs_no_trace(tmp_path):
    """The trace itself is in another file."""
    said: list[str] = []
    session = Session(ProfileConfig(active=1), Place(tmp_path / "profile"), want=TraceRequest(True, cycle=0), step=0)
    session.stop()
    (written,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    written.write_bytes(b"no gzip")
    session.keep(1, say=said.append)
    assert any("the timeline for viewers cannot be read: Not a gzipped file" in line for line in said)
    manifest = json.loads((tmp_path / "profile" / "step_00000000" / "manifest.json").read_text())
    assert manifest["timeline"] is None
