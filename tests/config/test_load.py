"""Unknown keys, reports of many problems, and configurations that are printed and read back."""

import dataclasses
import itertools
import json

import pytest

from nnxtrain.config.checks import LEAVES, SECTIONS, value_at
from nnxtrain.config.load import load
from nnxtrain.config.record import as_mapping, differences, list_keys, to_yaml
from tests.support import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yml"))


@pytest.mark.parametrize(
    ("content", "word", "place", "near"),
    [
        ("model:\n  layrs: 2\n", "", "run.yml:2: unknown key model.layrs", "model.layers"),
        ("modle:\n  layers: 2\n", "", "run.yml:2: unknown key modle.layers", "model.layers"),
        ("", "optimizer.lerning_rate=1", "unknown key optimizer.lerning_rate", "optimizer.learning_rate"),
        ("", "step=1", "unknown key step", "steps"),
        ("layers: 2\n", "", "run.yml:1: unknown key layers", "model.layers"),
        ("", "learning_rate=1", "unknown key learning_rate", "optimizer.learning_rate"),
        ("seed: 1\nmodel:\n  kv-heads: 2\n", "", "run.yml:3: unknown key model.kv-heads", "model.kv_heads"),
        ("", "batch.global-size=2", "unknown key batch.global-size", "batch.global_size"),
        ("model-layers: 2\n", "", "run.yml:1: unknown key model-layers", "model.layers"),
        ("", "Model.Layers=2", "unknown key Model.Layers", "model.layers"),
        ("", "MODEL.KV-HEADS=2", "unknown key MODEL.KV-HEADS", "model.kv_heads"),
        ("model:\n  learning_rate: 1\n", "", "run.yml:2: unknown key model.learning_rate", "optimizer.learning_rate"),
        ("", "model.layers.x=1", "unknown key model.layers.x", "model.layers"),
        ("steps: {a: 1}\n", "", "run.yml:1: unknown key steps.a", "steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(refused, content, word, place, near):
    """Misspelt, misplaced or hyphenated, a key that is dropped costs hours of training (B03)."""
    message = refused(content, *([word] if word else []))
    assert message == (f"command line '{word}': " if word else "") + f"{place}; did you mean {near}?"


def test_the_control_of_unknown_keys_loads(loaded):
    """The same keys, spelt right, are accepted (B03)."""
    config = loaded(
        "model:\n  layers: 2\n  kv_heads: 2\n", "optimizer.learning_rate=1", "batch.global_size=2", "steps=1"
    )
    assert (config.model.layers, config.model.kv_heads, config.batch.global_size, config.steps) == (2, 2, 2, 1)


def test_every_key_without_its_section_is_answered_with_its_section(refused):
    """A nested key at top level is refused and found, for every key (B03)."""
    leaves = [leaf for path in LEAVES if (leaf := path.rpartition(".")[2]) not in (*LEAVES, *SECTIONS)]
    lines = refused("", *(f"{leaf}=1" for leaf in leaves)).splitlines()[1:]
    for leaf, line in zip(leaves, lines, strict=True):
        assert f"unknown key {leaf}" in line
        assert any(known in line for known in LEAVES if known.rpartition(".")[2] == leaf), leaf


def test_every_key_with_hyphens_is_answered_with_its_underscores(refused):
    """For every key, whole or without its section (B03)."""
    paths = [path for path in LEAVES if "_" in path]
    lines = refused("", *(f"{path.replace('_', '-')}=1" for path in paths)).splitlines()[1:]
    for path, line in zip(paths, lines, strict=True):
        assert f"did you mean {path}?" in line


def test_a_leaf_of_several_sections_names_them_all(refused):
    """One of three at random would be a wrong lead."""
    message = refused("every_steps: 3\n")
    assert all(path in message for path in ("checkpoint.every_steps", "eval.every_steps", "log.every_steps"))


@pytest.mark.parametrize("path", ["lr", "optimizer.lr"])
def test_the_commonest_short_name_is_understood(refused, path):
    """No spelling is near `lr`; a guess such as optimizer.b2 misleads."""
    assert "optimizer.learning_rate" in refused("", f"{path}=1")


def test_nothing_near_points_to_the_list(refused):
    """A hint that has nothing to do with the word is worse than none."""
    assert refused("xyzzy: 1\n") == "run.yml:1: unknown key xyzzy; --list-keys shows all keys"


def test_a_section_is_no_key(loaded, refused):
    """A value in place of a section is refused; an empty section is none."""
    for section in SECTIONS:
        for message in (refused(f"{section}: 3\n"), refused("", f"{section}=3"), refused(f"{section}: [a]\n")):
            assert f"{section} is a section" in message
            assert f"{section}." in message
    empty, braces = ("".join(f"{section}: {end}\n" for section in SECTIONS) for end in ("", "{}"))
    assert loaded(empty) == loaded(braces) == loaded("")


def test_a_mapping_in_place_of_a_value_is_refused(refused):
    """An empty mapping has no key below it that could be unknown."""
    assert refused("seed: 1\nsteps: {}\n") == "run.yml:2: steps: expected a value, got a section"


def test_all_problems_are_reported_at_once_with_their_places(refused):
    """One problem a start would take seven starts."""
    content = "# a comment\nsteps: many\n\nmodel:\n  layrs: 2\n  tied: maybe\n  embed: 0\n  embed: 1\nbatch: 3\n"
    message = refused(content, "optimizer.name=adamm", "mesh.stage=2", "steps")
    head, *problems = message.splitlines()
    assert head == "9 problems in the configuration:"
    starts = {
        "run.yml:2: steps: ",
        "run.yml:5: unknown key model.layrs",
        "run.yml:6: model.tied: ",
        "run.yml:7: model.embed: ",
        "run.yml:8: model.embed: already set in line 7",
        "run.yml:9: batch is a section",
        "command line 'optimizer.name=adamm': optimizer.name: ",
        "command line 'mesh.stage=2': mesh.stage: ",
        "command line 'steps': expected key=value",
    }
    assert len(problems) == len(starts)
    for start in starts:
        assert sum(problem.startswith(f"  {start}") for problem in problems) == 1, start


def test_problems_of_several_sections_are_reported_together(refused):
    """Checks inside sections stop at the first section otherwise."""
    message = refused("batch: {global_size: 6, accum_steps: 4}\n", "model.kv_heads=3")
    assert message.startswith("2 problems")
    assert "run.yml:1: batch.global_size: 6" in message
    assert "command line 'model.kv_heads=3': model.kv_heads: 3" in message


def test_problems_of_single_keys_and_of_pairs_are_reported_at_once(refused):
    """The second kind came only after the first was mended (N21)."""
    message = refused("", "model.kv_heads=3", "steps=-1", "data.source=nowhere", "optimizer.momentum=0.5")
    assert message.startswith("4 problems")
    for key in ("model.kv_heads: 3 must divide", "steps: -1", "data.source: 'nowhere'", "optimizer.momentum: 0.5 has"):
        assert message.count(f": {key}") == 1


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("model.kv_heads=3", "model.heads=many"),
        ("model.vocab=100", "data.source=nowhere"),
        ("model.vocab=100", "data.tokenizer=none"),
        ("batch.global_size=6", "mesh.data=x"),
        ("batch.accum_steps=3", "batch.global_size=0"),
        ("loss.chunks=7", "batch.sequence=1.5"),
        ("loss.chunks=7", "batch.sequenze=64"),
        ("mesh.slices=3", "mesh.data=-2"),
        ("profile.enabled=true", "steps=-1"),
        ("profile.processes=7", "profile.enabled=perhaps"),
        ("optimizer.momentum=0.5", "optimizer.name=sdg"),
        ("model.window=4", "model.patern=local"),
        ("schedule.decay_steps=9", "schedule.name=1"),
        ("aot.save=x", "aot.lower_only=maybe"),
        ("remat.tags=keys=save", "remat=custom"),
        ("model.pattern=local", "model.window=0"),
        ("model.rope_scaling=llama3", "model.rope_high=x"),
    ],
)
def test_a_check_that_a_broken_key_takes_part_in_is_left_out(refused, sound, broken):
    """What the key was to be is not known: a problem with its default would be one that nobody has."""
    message = refused("", sound, broken)
    assert message.startswith(f"command line '{broken}': ")
    assert "\n" not in message


def test_problems_inside_a_section_and_across_sections_are_reported_together(refused):
    """Neither hides the other: the user mends both in one go."""
    message = refused("batch: {global_size: 6, accum_steps: 4}\n", "loss.chunks=7")
    assert "batch.global_size: 6" in message
    assert "loss.chunks: 7" in message


def test_a_problem_that_keys_have_with_each_other_names_what_the_user_wrote(refused):
    """The key that is named may stand at its default; then the word that clashes with it is the place to look."""
    assert "command line 'batch.accum_steps=3'" in refused("seed: 1\n", "batch.accum_steps=3")
    assert "run.yml:2" in refused("seed: 1\nbatch: {accum_steps: 3}\n")


def test_the_place_of_a_problem_is_the_word_that_won(refused):
    """The line of the file is innocent once the command line overrides it."""
    assert refused("steps: 5\n", "steps=-1").startswith("command line 'steps=-1': steps: -1 must be at least 0")
    assert refused("", "steps=-1", "steps=-2").startswith("command line 'steps=-2'")


def test_a_value_out_of_range_that_a_later_word_mends_is_accepted(loaded):
    """What counts is the configuration of the run, not the file alone."""
    assert loaded("steps: -5\n", "steps=5").steps == 5


def test_names_from_outside_are_admitted_where_the_caller_says(write, refused):
    """`load(..., extra=...)` lets code outside the package add table entries."""
    path = write("optimizer: {name: mine}\n")
    assert load(path, extra={"optimizer.name": ("mine",)}).optimizer.name == "mine"
    assert "'mine' is not one of adamw, " in refused("optimizer: {name: mine}\n")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_survives_printing(write, path):
    """A key that is renamed leaves the shipped files behind."""
    config = load(path)
    assert config.run_name == path.stem
    assert load(write(to_yaml(config))) == config


STRINGS = [
    "say \"hi\" and 'bye'",
    "def f(x):\n    return x\n",
    "a: b # c",
    "  lead and trail  ",
    "",
    "null",
    "none",
    "~",
    "1e-4",
    "no",
    "- item",
    "[a, b]",
    "{a: b}",
    "*.txt",
    "&a !b @c `d` %e",
    "back\\slash \\n",
    "tab\there\r\nand\x07bell",
    "é 日本 😀 \u2028 \x85 \ufeff",
    "long " * 60 + "  two spaces   " * 20,
    "\n\n",
    ":",
    "'",
    '"',
]


@pytest.mark.parametrize("text", STRINGS)
def test_any_text_survives_printing(loaded, write, text):
    """Prompts, field names and paths hold what YAML gives a meaning to."""
    words = (
        f"generate.prompt={text}",
        f"data.text_field=t{text}",
        f"output_dir=o{text}",
        "data.source=text",
        "data.path=x",
    )
    config = loaded("", *words)
    assert config.generate.prompt == text
    assert load(write(to_yaml(config))) == config


@pytest.mark.parametrize("text", ["none", "None", "NONE", "null", "~", "x"])
def test_a_quoted_null_of_an_optional_key_survives_printing(loaded, write, text):
    """A folder called none would become no folder when the printed file is read back."""
    config = loaded(f"run_name: '{text}'\ndata: {{cache_dir: '{text}'}}\n")
    assert config.data.cache_dir == text
    assert load(write(to_yaml(config))) == config


def test_lists_survive_printing(loaded, write):
    """Commas, brackets and spaces inside an item are part of it."""
    config = loaded(
        "data: {source: text, path: ['a,b', '[c]', ' d ', 'none', '*.txt', \"it's\"], validation_path: x=y}\n"
    )
    assert config.data.path == ("a,b", "[c]", " d ", "none", "*.txt", "it's")
    assert load(write(to_yaml(config))) == config


def test_differences_read_as_one_writes_yaml(loaded):
    """A resumed run lists them; where the run lies is no difference, and JSON between the two adds none."""
    words = ("model.tied=true", "optimizer.learning_rate=1e-2", "data.source=text", "data.path=a,b", "run_name=other")
    before, after = as_mapping(loaded("", "data.epochs=2")), as_mapping(loaded("", *words))
    assert differences(before, after) == [
        "model.tied: false → true",
        "data.source: stdlib → text",
        "data.path: [] → [a, b]",
        "data.epochs: 2 → null",
        "optimizer.learning_rate: 0.0003 → 0.01",
    ]
    assert differences(json.loads(json.dumps(after)), after) == []
    assert list(after) == list(LEAVES)


def test_the_product_is_frozen_all_the_way_down(loaded):
    """A value that changes after the checks is a value that was not checked."""
    config = loaded("")
    for part in (config, *(getattr(config, name) for name in SECTIONS)):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)
    assert hash(config) == hash(loaded(""))


def test_keys_are_listed_by_prefix():
    """Each row has path, type, default and a meaning with choices and range."""
    rows = {path: rest for path, *rest in list_keys("")}
    assert list(rows) == list(LEAVES)
    assert [path for path, *_ in list_keys("model.rope_")] == [
        path for path in LEAVES if path.startswith("model.rope_")
    ]
    assert list_keys("nothing") == []
    kind, default, doc = rows["schedule.name"]
    assert (kind, default) == ("str", "cosine")
    assert "(constant, cosine, inverse_sqrt, linear, wsd)" in doc
    assert "in [0, 1)" in rows["data.validation_fraction"][2]
    assert "(not implemented yet)" in rows["mesh.stage"][2]


def test_values_are_found_by_their_path(loaded):
    """Top level and nested."""
    config = loaded("", "steps=3", "model.layers=7")
    assert (value_at(config, "steps"), value_at(config, "model.layers")) == (3, 7)


def test_words_on_different_keys_commute(loaded):
    """Sizes are checked once all are known, not one after another."""
    want = loaded("model: {embed: 96, heads: 6}\nbatch: {sequence: 64}\n")
    for words in itertools.permutations(["model.embed=96", "model.heads=6", "batch.sequence=64"]):
        assert loaded("", *words) == want
