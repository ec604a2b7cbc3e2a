"""What `data.source` names: training rows, held-out sets, and a line about them."""

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from nnxtrain.build.registry import BUILT_IN
from nnxtrain.build.tokenizer import make_tokenizer
from nnxtrain.data.sources import stdlib
from nnxtrain.data.sources.table import DATASETS
from nnxtrain.errors import ConfigError, DataError
from nnxtrain.tokenizers.byte import ByteTokenizer
from nnxtrain.types import RowSpec
from tests.support import tiny


def dataset(source: str, *words: str, vocab: int = 384):
    """Returns the dataset of `source`, in rows of 32 tokens."""
    config = tiny(f"data.source={source}", f"model.vocab={vocab}", *words)
    return DATASETS[source](config.data, RowSpec(32, make_tokenizer(config, BUILT_IN), 0))


def texts(rows) -> set[str]:
    """Returns the documents of packed rows."""
    corpus = rows.corpus
    return {ByteTokenizer().decode(corpus.tokens[a:b]) for a, b in itertools.pairwise(corpus.starts)}


@pytest.fixture
def place(tmp_path):
    """Returns a folder of text: a.txt and b.txt to train on, c.txt and d.jsonl to hold out."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 20)
    (tmp_path / "d.jsonl").write_text('{"text": "text d"}\n{"text": null}\n{"text": "more d"}\n')
    return tmp_path


def test_text_trains_on_its_files_and_holds_out_what_is_named(place):
    """Sets without a name are called validation; several patterns of one name are one set."""
    words = f"[{place}/c.txt, code={place}/a.txt, code={place}/b.txt, {place}/d.jsonl]"
    made = dataset("text", f"data.path={place}/[ab].txt", f"data.validation_path={words}", f"data.cache_dir={place}/c")
    assert texts(made.train) == {"text a " * 20, "text b " * 20}
    assert {name: texts(rows) for name, rows in made.held_out.items()} == {
        "validation": {"text c " * 20, "text d", "more d"},
        "code": {"text a " * 20, "text b " * 20},
    }


def test_text_without_held_out_files_has_no_held_out_set(place):
    """Evaluating on nothing would log a loss of zero."""
    assert dataset("text", f"data.path={place}/a.txt", f"data.cache_dir={place}/c").held_out == {}


def test_a_held_out_pattern_that_matches_nothing_is_refused_by_its_own_key(place):
    """The key of the training files would send people to the wrong line."""
    words = (f"data.path={place}/a.txt", f"data.validation_path=code={place}/no.txt", f"data.cache_dir={place}/c")
    with pytest.raises(ConfigError, match=r"data\.validation_path: .*no\.txt"):
        dataset("text", *words)


def test_a_path_may_hold_an_equals_sign(place):
    """Folders called `lang=en` are common; only a plain word before the sign is a name."""
    (place / "lang=en").mkdir()
    (place / "lang=en" / "e.txt").write_text("english")
    words = (f"data.path={place}/a.txt", f"data.cache_dir={place}/c")
    made = dataset("text", *words, f"data.validation_path={place}/lang=en/e.txt")
    assert {name: texts(rows) for name, rows in made.held_out.items()} == {"validation": {"english"}}


def test_text_describes_its_training_corpus(place):
    """The line of the log says what was read and what was left out."""
    made = dataset("text", f"data.path={place}/*.jsonl", f"data.cache_dir={place}/c")
    assert made.description == str(made.train.corpus)
    assert "2 documents" in made.description
    assert "1 empty" in made.description


def test_options_of_the_reader_reach_it(place):
    """A cache that does not know them would give the text of another field."""
    (place / "e.jsonl").write_bytes(b'{"text": "one", "body": "tw\xc0"}')
    words = (f"data.path={place}/e.jsonl", f"data.cache_dir={place}/c")
    with pytest.raises(DataError, match="0xc0"):
        dataset("text", *words)
    assert texts(dataset("text", *words, "data.invalid_utf8=replace").train) == {"one"}
    made = dataset("text", *words, "data.invalid_utf8=replace", "data.text_field=body")
    assert texts(made.train) == {"tw\ufffd"}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Returns a folder that passes for Python's standard library: 40 small files, and some that are no part of it."""
    root = tmp_path / "lib"
    names = [f"pkg{i % 4}/module{i}.py" for i in range(40)]
    for name in [*names, "test/no.py", "pkg0/tests/no.py", "site-packages/no.py", "pkg1/__pycache__/no.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "pkg0" / "data.txt").write_text("no")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    monkeypatch.setattr(stdlib, "SMALLEST_BYTES", 1)
    return root


def test_stdlib_holds_out_whole_files_and_reads_each_file_once(library, tmp_path):
    """A file in both sets would be validated on what was trained on."""
    made = dataset("stdlib", "data.validation_fraction=0.3", f"data.cache_dir={tmp_path}/c")
    train, held = texts(made.train), texts(made.held_out["validation"])
    assert not train & held
    assert train | held == {f"pkg{i % 4}/module{i}.py" for i in range(40)}
    assert 4 <= len(held) <= 20
    assert "standard library" in made.description
    assert str(made.train.corpus) in made.description


def test_the_split_does_not_depend_on_order_or_on_other_files(library, tmp_path, monkeypatch):
    """A split by position changes with every file that comes or goes, and with the order of the disk."""
    words = ("data.validation_fraction=0.3", f"data.cache_dir={tmp_path}/c")
    before = texts(dataset("stdlib", *words).held_out["validation"])
    listed = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(listed(self, pattern))))
    assert texts(dataset("stdlib", *words).held_out["validation"]) == before
    (library / "aaa.py").write_text("aaa")
    assert texts(dataset("stdlib", *words).held_out["validation"]) - {"aaa"} == before
    (library / "pkg0" / "module0.py").unlink()
    assert texts(dataset("stdlib", *words).held_out["validation"]) - {"aaa"} == before - {"pkg0/module0.py"}


def test_stdlib_without_a_share_has_no_held_out_set(library, tmp_path):
    """`data.validation_fraction=0` is all for training."""
    made = dataset("stdlib", "data.validation_fraction=0", f"data.cache_dir={tmp_path}/c")
    assert made.held_out == {}
    assert len(texts(made.train)) == 40


def test_a_python_without_its_sources_is_refused_with_a_way_out(library, tmp_path, monkeypatch):
    """Stripped containers have none; the message says what else to do."""
    monkeypatch.setattr(stdlib, "SMALLEST_BYTES", 1_000_000)
    with pytest.raises(ConfigError) as caught:
        dataset("stdlib", f"data.cache_dir={tmp_path}/c")
    for word in ("data.source=stdlib", str(library), "data.path="):
        assert word in str(caught.value)


def test_the_real_standard_library_is_split_by_files():
    """About one file in twenty; the sizes differ from one Python to the next."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    shares = np.array([stdlib.unit_hash(name) for name in names])
    assert 0 <= shares.min() <= shares.max() < 1
    assert 0.02 < (shares < 0.05).mean() < 0.08


def test_synthetic_rows_are_held_out_from_another_stream():
    """The same draws would be validated on what was trained on, also with the seeds of two runs side by side."""
    config = tiny()
    streams = []
    for seed in (0, 1):
        made = DATASETS["synthetic"](config.data, RowSpec(32, make_tokenizer(config, BUILT_IN), seed))
        streams += [made.train, made.held_out["validation"]]
    first = {rows[0]["inputs"].tobytes() for rows in streams}
    assert len(first) == 4
    assert max(rows[index]["targets"].max() for rows in streams for index in range(8)) < 256
