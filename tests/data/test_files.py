"""Patterns to files (B30)."""

import glob
from pathlib import Path

import pytest

from nnxtrain.data.files import find_files
from nnxtrain.errors import ConfigError


def written(file: Path, content: bytes) -> Path:
    """Returns `file`, which holds `content`."""
    file.write_bytes(content)
    return file


@pytest.fixture
def tree(tmp_path):
    """Returns a folder of files and folders."""
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", "deep/e.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "only" / "folders").mkdir(parents=True)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["nothing.txt", "*.parquet", "only", "only/*", "empty.txt", "[eb][ml]*.txt", "only/"]
)
def test_a_pattern_without_text_is_refused_by_key_and_pattern(tree, pattern):
    """An endless wait for data, or a division by zero rows, would come instead (B30)."""
    with pytest.raises(ConfigError) as caught:
        find_files([f"{tree}/a.txt", f"{tree}/{pattern}"], key="data.validation_path")
    assert "data.validation_path" in str(caught.value)
    assert f"{tree}/{pattern}" in str(caught.value)


def test_folders_get_a_hint_that_works(tree):
    """The hint is what people paste next."""
    with pytest.raises(ConfigError) as caught:
        find_files([f"{tree}/deep/"], key="data.path")
    hint = str(caught.value).split("such as '")[1].split("'")[0]
    assert "//" not in hint
    assert [file.name for file in find_files([hint], key="data.path")] == ["c.txt", "d.txt"]


def test_two_stars_go_down_all_folders(tree):
    """A glob that is not recursive sees one level."""
    found = find_files([f"{tree}/**/*.txt"], key="data.path")
    assert [file.relative_to(tree).as_posix() for file in found] == [
        "a.txt", "b.txt", "blank.txt", "deep/c.txt", "deep/er/d.txt", "empty.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern", ["**/*.txt", "**/e*", "**", "deep/**/*.txt", "**/er/**", "d*/**/d.txt", "**/**/c.*"]
)
def test_two_stars_match_what_glob_matches(tree, pattern, monkeypatch):
    """The walk is our own, so that it ends; what it finds is not."""
    (tree / "there").symlink_to("deep")
    (tree / ".hidden").mkdir()
    (tree / ".hidden" / "f.txt").write_text("hidden")
    expected = {Path(match).resolve() for match in glob.glob(f"{tree}/{pattern}", recursive=True)}
    expected = {match for match in expected if match.is_file()}
    assert {file.resolve() for file in find_files([f"{tree}/{pattern}"], key="data.path")} == expected
    monkeypatch.chdir(tree)
    assert {file.resolve() for file in find_files([pattern], key="data.path")} == expected


def test_loops_of_links_end(tree):
    """Each step into a loop doubles the paths; a walk along all of them takes years."""
    for name in ("one", "two", "three"):
        (tree / name).symlink_to(tree)
    assert len(find_files([f"{tree}/**/*.txt"], key="data.path")) == 6


def test_files_are_sorted_whatever_the_order_of_the_patterns(tree):
    """The corpus, and with it every row, depends on this order."""
    one = find_files([f"{tree}/b.txt", f"{tree}/a.txt"], key="data.path")
    assert one == find_files([f"{tree}/a.txt", f"{tree}/b.txt"], key="data.path")
    assert [file.name for file in one] == ["a.txt", "b.txt"]


def test_a_file_that_is_named_twice_is_read_once(tree, monkeypatch):
    """Text read twice weighs twice; overlapping globs and other spellings of a path are easily written."""
    monkeypatch.chdir(tree)
    for again in ("*.txt", "./a.txt", "deep/../a.txt", f"{tree}/a.txt"):
        found = find_files(["a.txt", again], key="data.path")
        assert [file.name for file in found].count("a.txt") == 1, again


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path):
    """Downloaded files are called `corpus[1].txt`; the name in full must do."""
    file = written(tmp_path / "corpus[1].txt", b"x")
    assert find_files([str(file)], key="data.path") == [file]


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """No shell expands the `~` of `data.path=~/corpus.txt`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = written(tmp_path / "corpus.txt", b"x")
    assert find_files(["~/corpus.txt"], key="data.path") == [file]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("set [v2]/one.txt", "set [v2]/*.txt"),
        ("set [v2]/deep/one.txt", "set [v2]/**/*.txt"),
        ("a[1]/b[2]/one.txt", "a[1]/b[2]/o*"),
        ("all/set [v2]/one.txt", "*/set [v2]/*.txt"),
        ("deep/er/x[y].txt", "**/x[y].txt"),
        ("[en] one.txt", "[en] *.txt"),
        ("half[open/one.txt", "half[open/*.txt"),
        ("set [v2]/one.txt", "set [[]v2]/*.txt"),
    ],
)
def test_brackets_of_a_name_are_found_inside_a_pattern(tmp_path, name, pattern):
    """Downloaded folders are called `set [v2]`; as a glob that names `set v` and `set 2` (N05)."""
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    file = written(tmp_path / name, b"x")
    for other in ("set v", "set 2", "a1"):
        (tmp_path / other).mkdir(exist_ok=True)
        written(tmp_path / other / "one.txt", b"other")
    assert find_files([f"{tmp_path}/{pattern}"], key="data.path") == [file]


def test_brackets_stay_a_choice_of_characters_where_no_name_has_them(tmp_path):
    """What globs could do before, they still can (N05)."""
    for name in ("a1.txt", "a2.txt", "a3.txt"):
        written(tmp_path / name, b"x")
    assert [file.name for file in find_files([f"{tmp_path}/a[12].txt"], key="data.path")] == ["a1.txt", "a2.txt"]


def refusal(place: Path, *patterns: str) -> str:
    """Returns what is said of patterns in `place`."""
    with pytest.raises(ConfigError) as caught:
        find_files([f"{place}/{pattern}" for pattern in patterns], key="data.path")
    return str(caught.value)


@pytest.mark.parametrize("name", ["a,b.txt", "a, b.txt", "a,b/c.txt", "a,b,c.txt"])
def test_a_comma_of_a_name_is_named_with_a_way_to_write_it(tmp_path, name):
    """The command line splits a list at commas, so a file `a,b.txt` comes as two entries (N05)."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    file = written(tmp_path / name, b"x")
    message = refusal(tmp_path, *(entry.strip() for entry in name.split(",")))
    assert "comma" in message
    hint = message.split("write '")[1].split("'")[0]
    found = find_files([f"{hint}/*" if Path(tmp_path / "a,b").is_dir() else hint], key="data.path")
    assert found == [file]


def test_a_pattern_torn_at_its_second_part_says_that_commas_separate(tmp_path):
    """The first half, `a*`, matches the file itself (N05)."""
    written(tmp_path / "a,b.txt", b"x")
    assert "comma" in refusal(tmp_path, "a*", "b*.txt")


def test_a_pattern_with_brackets_that_matches_nothing_says_how_to_write_one(tmp_path):
    """Nobody suspects the bracket of a name that they copied (N05)."""
    assert "[[]" in refusal(tmp_path, "set [v3]/*.txt")
    assert "[" not in refusal(tmp_path, "set/*.txt")
