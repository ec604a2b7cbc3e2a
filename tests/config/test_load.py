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


@pytest.mark.parametrize("path", [path for path in LEAVES if "." in path])
def test_every_key_without_its_section_is_answered_with_its_section(refused, path):
    """A nested key at top level is refused and found, for every key (B03)."""
    leaf = path.rpartition(".")[2]
    if leaf in LEAVES or leaf in SECTIONS:
        pytest.skip("the name alone is a key or a section of its own")
    message = refused(f"{leaf}: 1\n")
    owners = [known for known in LEAVES if known.rpartition(".")[2] == leaf]
    assert any(owner in message for owner in owners)


@pytest.mark.parametrize("path", [path for path in LEAVES if "_" in path])
def test_every_key_with_hyphens_is_answered_with_its_underscores(refused, path):
    """For every key, whole or without its section (B03)."""
    assert f"did you mean {path}?" in refused("", f"{path.replace('_', '-')}=1")


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


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_no_key(loaded, refused, section):
    """A value in place of a section is refused; an empty section is none."""
    for message in (refused(f"{section}: 3\n"), refused("", f"{section}=3"), refused(f"{section}: [a]\n")):
        assert f"{section} is a section" in message
        assert f"{section}." in message
    assert loaded(f"{section}:\n") == loaded(f"{section}: {{}}\n") == loaded("")


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
        "run.yml:8: model.embed: already given in line 7",
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


def test_problems_inside_a_section_and_across_sections_are_reported_together(refused):
    """Neither hides the other: the user mends both in one go."""
    message = refused("batch: {global_size: 6, accum_steps: 4}\n", "model.vocab=100")
    assert "batch.global_size: 6" in message
    assert "model.vocab: 100" in message


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
        f"data.text_field={text}",
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


# values that differ from the defaults and fit each other; of the rest, any value will do
OTHER: dict[str, str | None] = {
    "run_name": "other", "model.embed": "96", "model.heads": "6", "model.kv_heads": "3", "model.head_dim": "32",
    "model.vocab": "300", "model.rope_low": "2", "model.rope_high": "8", "batch.global_size": "24",
    "batch.accum_steps": "3", "batch.sequence": "64", "batch.accumulator": "scan", "data.source": "text",
    "loss.chunks": "4", "mesh.data": "2", "checkpoint.resume": "never", "eval.global_size": "8",
    "mesh.slices": "2", "mesh.rules": "mlp=none", "distributed.coordinator": "host:1234",
    "optimizer.clip_norm": "null", "debug.compilation_cache": "none", "model.pattern": "local,global",
    "model.window": "8", "remat.policy": "custom", "remat.tags": "mlp_hidden=save,queries=offload",
    "profile.skip_first": "0", "profile.wait": "1",
    "profile.warmup": "0", "profile.python_tracer_level": "1", "profile.processes": "first",
    "profile.advanced": "level=1", "aot.topology": "cpu:8", "aot.compiler_options": "xla_flag=1",
    "aot.sweep": "remat.policy=none,full", "aot.save": None,  # of one step, and a grid compiles many
    "optimizer.name": "muon", "optimizer.groups": "embedding/* freeze,head/* decay=0 rate_scale=.5",
    "schedule.warmup_steps": None, "schedule.decay_steps": None,  # fractions say the same
}  # fmt: skip


def other_than_default(path: str) -> str | None:
    """Returns a word for a value that is not the default, or None where there is no such value (yet)."""
    leaf = LEAVES[path]
    rule = leaf.declared.metadata
    if path in OTHER or rule["planned"]:
        return OTHER.get(path)
    if rule["choices"]:
        return next((name for name in rule["choices"] if name != leaf.default), None)
    if isinstance(leaf.default, bool):
        return str(not leaf.default)
    if rule["span"]:
        low, high = (float(end) for end in rule["span"][1:-1].split(","))
        number = (low + high) / 2 if high < 1e9 else low + 3
        number += number == leaf.default
        return f"{number:g}" if "float" in str(leaf.type) else str(int(number))
    return "a,b" if isinstance(leaf.default, tuple) else "words"


def test_every_key_survives_printing_when_it_is_not_the_default(loaded, write):
    """A key that is left out of the printed file, or printed as another type, shows here."""
    values = {path: other_than_default(path) for path in LEAVES if path != "model.preset"}
    words = {path: text for path, text in values.items() if text is not None}
    config = loaded("", *(f"{path}={text}" for path, text in words.items()))
    default = loaded("")
    assert {path for path in LEAVES if value_at(config, path) != value_at(default, path)} == set(words)
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
    assert "in [0, 1)" in rows["model.dropout"][2]
    assert "(not built yet)" in rows["mesh.stage"][2]


def test_values_are_found_by_their_path(loaded):
    """Top level and nested."""
    config = loaded("", "steps=3", "model.layers=7")
    assert (value_at(config, "steps"), value_at(config, "model.layers")) == (3, 7)


@pytest.mark.parametrize(
    "words", list(itertools.permutations(["model.embed=96", "model.heads=6", "batch.sequence=64"]))
)
def test_words_on_different_keys_commute(loaded, words):
    """Sizes are checked once all are known, not one after another."""
    assert loaded("", *words) == loaded("model: {embed: 96, heads: 6}\nbatch: {sequence: 64}\n")
