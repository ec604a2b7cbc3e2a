"""docs/architecture.md is true: its rooms, floors and top modules are those of the tree."""

import re

from tests.support import ROOT
from tools.check_floors import FLOORS

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "nnxtrain"


def test_every_room_has_its_paragraph_and_no_other():
    """A room that moved in, or out, without a word makes the map wrong."""
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^- \*\*(\w+)/\*\*", PAGE, re.MULTILINE)) == rooms


def test_the_picture_shows_each_room_on_its_floor():
    """The picture is what people remember; the table is what the build checks."""
    picture = re.search(r"```text\nfloor\n(.*?)```", PAGE, re.DOTALL)[1]
    lines = {int(line.split()[0]): line for line in picture.splitlines()}
    for name, row in FLOORS.items():
        if name != "run.run":
            shown = name.replace(".", "/") if "." in name else f"{name}/" if (PACKAGE / name).is_dir() else name
            assert re.search(rf"(?<![\w/]){re.escape(shown)}(?!\w)", lines[row.floor]), (name, row.floor)


def test_the_top_holds_commands_and_shared_words_alone():
    """Twenty-six loose modules stood here once."""
    top = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    commands, words = {"train", "evaluate", "generate", "launch"}, {"types", "errors", "axes", "tags", "state"}
    assert top == commands | words
    assert all(f"`{name}.py`" in PAGE or f"`{name}`" in PAGE for name in top)


def test_files_that_the_page_names_are_there():
    """A page that names a file that moved sends its reader nowhere."""
    for room, name in re.findall(r"`(\w+)/(\w+\.py)`", PAGE):
        root = ROOT if room == "tools" else PACKAGE
        assert (root / room / name).is_file(), f"{room}/{name}"
