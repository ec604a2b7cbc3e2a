"""TensorBoard's files after a restart: curves that never fold back (B27)."""

import pytest
from tensorboardX import SummaryWriter

from nnxtrain.metrics.rewind import cut_events, records


def write(folder, steps, *, suffix: str = "") -> None:
    """Writes a scalar for each step, as a run does, to a file of its own."""
    writer = SummaryWriter(str(folder), filename_suffix=suffix)
    for step in steps:
        writer.add_scalar("train/loss", 10.0 - step, step)
    writer.close()


def read(folder) -> list[tuple[int, float]]:
    """Returns step and value of every scalar, in the order of the files."""
    return [
        (event.step, value.simple_value)
        for path in sorted(folder.glob("events.out.tfevents.*"))
        for _, event in records(path)
        for value in event.summary.value
    ]


def test_events_beyond_the_step_are_removed_from_every_file(tmp_path):
    """Points 11 to 15 of the run that was killed would stand beside those of the resumed one."""
    write(tmp_path, range(1, 9), suffix=".a")
    write(tmp_path, range(9, 16), suffix=".b")
    cut_events(tmp_path, beyond=10)
    assert read(tmp_path) == [(step, 10.0 - step) for step in range(1, 11)]
    write(tmp_path, range(11, 21), suffix=".c")
    assert [step for step, _ in read(tmp_path)] == list(range(1, 21))


@pytest.mark.parametrize("lost", [1, 5, 20])
def test_the_half_record_of_a_killed_run_is_removed(tmp_path, lost):
    """Readers stop at it, and what a resumed run appends behind it is never seen."""
    write(tmp_path, range(1, 6))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-lost])
    cut_events(tmp_path, beyond=10)
    assert [step for step, _ in read(tmp_path)] == [1, 2, 3, 4]
    assert path.stat().st_size == sum(len(record) for record, _ in records(path))


def test_what_is_kept_is_kept_byte_for_byte(tmp_path):
    """Checksums are part of the records; writing them anew would need them computed anew."""
    write(tmp_path, range(1, 6))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    cut_events(tmp_path, beyond=5)
    assert path.read_bytes() == before
    cut_events(tmp_path, beyond=3)
    assert before.startswith(path.read_bytes())
    assert [step for step, _ in read(tmp_path)] == [1, 2, 3]


def test_cutting_to_nothing_leaves_the_head(tmp_path):
    """The first record says the version of the format; a reader needs it."""
    write(tmp_path, range(1, 4))
    cut_events(tmp_path, beyond=0)
    (path,) = tmp_path.iterdir()
    (head,) = [event for _, event in records(path)]
    assert head.file_version.startswith("brain.Event")


def test_a_folder_that_is_not_there_or_holds_other_files_is_no_error(tmp_path):
    """A first start has no events; people keep notes where they like."""
    cut_events(tmp_path / "none", beyond=3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "events.out.tfevents.0.empty").write_bytes(b"")
    cut_events(tmp_path, beyond=3)
    assert (tmp_path / "notes.txt").read_text() == "mine"
