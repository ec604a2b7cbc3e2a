"""Every key: declared well, refused where it must be, and its choices those of the code."""

import re
import types
import typing

import pytest

from nnxtrain.build.registry import ENGINES
from nnxtrain.config.checks import LEAVES, SECTIONS, value_at
from nnxtrain.config.key import problem_of
from nnxtrain.config.load import load
from nnxtrain.config.presets import PRESETS
from nnxtrain.config.reads import show
from nnxtrain.data.sources.table import DATASETS
from nnxtrain.models.families.table import MODELS
from nnxtrain.models.remat import REMAT_POLICIES
from nnxtrain.nn.kernels import ATTENTIONS
from nnxtrain.optim.optimizers import OPTIMIZERS
from nnxtrain.optim.schedules import SCHEDULES
from nnxtrain.steps.accumulate import ACCUMULATORS
from nnxtrain.tokenizers.table import TOKENIZERS
from tests.support import ROOT

CAP = 160
PLANNED = [path for path, leaf in LEAVES.items() if leaf.declared.metadata["planned"]]
RANGED = [path for path, leaf in LEAVES.items() if leaf.declared.metadata["span"]]
CHOSEN = [path for path, leaf in LEAVES.items() if leaf.declared.metadata["choices"]]

PROMISED = {
    "": "run_name output_dir steps seed",
    "model": "name preset layers embed heads kv_heads head_dim mlp vocab dropout dtype param_dtype tied scan_layers "
    "pattern attention",
    "batch": "global_size accum_steps sequence accumulator",
    "data": "source path validation_path epochs",
    "loss": "z_loss chunks",
    "optimizer": "name learning_rate weight_decay clip_norm",
    "schedule": "name warmup_steps",
    "mesh": "data fsdp tensor context stage expert rules",
    "remat": "policy",
    "checkpoint": "enabled every_steps keep_last background resume init_from",
    "eval": "every_steps",
    "log": "every_steps",
    "profile": "enabled skip_first wait warmup active repeat",
    "engine": "name",
    "pipeline": "mode stages microbatches repeats schedule",
    "aot": "topology report lower_only sweep save load",
    "distributed": "coordinator processes process",
}


def test_keys_are_those_of_the_golden_list():
    """A key that appears, goes or is renamed breaks someone's file: say so in the same commit."""
    golden = (ROOT / "tests" / "golden" / "config_keys.txt").read_text().splitlines()
    assert list(LEAVES) == golden
    assert len(golden) <= CAP


def test_promised_names_are_keys():
    """Users and scripts rely on them."""
    assert {*PROMISED, "generate", "debug"} == {"", *SECTIONS}
    for section, names in PROMISED.items():
        assert {f"{section}.{name}".removeprefix(".") for name in names.split()} <= set(LEAVES)


def test_every_key_is_documented_and_has_a_default_of_its_type():
    """`--list-keys` is the reference; a default that its own declaration refuses makes every file fail."""
    for path, leaf in LEAVES.items():
        doc = leaf.declared.metadata["doc"]
        assert len(doc) > 8, path
        assert doc == doc.strip(), path
        assert doc.isascii(), path
        assert "\n" not in doc, path
        assert problem_of(leaf.declared, leaf.default) is None, path
        kinds = typing.get_args(leaf.type) if isinstance(leaf.type, types.UnionType) else (leaf.type,)
        assert type(leaf.default) in {typing.get_origin(kind) or kind for kind in kinds}, path
        choices = leaf.declared.metadata["choices"]
        assert not choices or leaf.default is None or leaf.default in choices, path


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("model.name", MODELS),
        ("model.preset", PRESETS),
        ("model.attention", {"auto", *ATTENTIONS}),
        ("optimizer.name", OPTIMIZERS),
        ("schedule.name", SCHEDULES),
        ("remat.policy", {"none", "custom", *REMAT_POLICIES}),
        ("batch.accumulator", {"auto", *ACCUMULATORS}),
        ("engine.name", ENGINES),
        ("data.source", DATASETS),
        ("data.tokenizer", TOKENIZERS),
    ],
)
def test_choices_are_the_tables_of_the_code(path, names):
    """A name in one place alone is either refused although it works, or fails after minutes."""
    choices = LEAVES[path].declared.metadata["choices"]
    assert len(set(choices)) == len(choices)
    assert set(choices) == set(names)


def test_a_name_that_is_none_of_the_choices_is_refused_with_all_of_them(refused):
    """From the file and from the command line."""
    for path in CHOSEN:
        choices = LEAVES[path].declared.metadata["choices"]
        section, _, name = path.partition(".")
        wrong = choices[0] + "x"
        for message in (refused("", f"{path}={wrong}"), refused(f"{section}:\n  {name}: {wrong}\n")):
            assert f"{path}: '{wrong}' is not one of {', '.join(choices)}" in message
            assert "did you mean" in message


def others_than_default(path: str) -> list[str]:
    """Returns words of the key's type that are not its default."""
    kind, default = LEAVES[path].type, LEAVES[path].default
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    if kind is bool:
        return [str(not default)]
    if kind is int:
        return [str(default + 1), str(default - 1), "2e3"]
    return ["other", "[other]"] if typing.get_origin(kind) is tuple else ["other"]


def test_there_are_planned_keys():
    """A generated test over an empty list would pass."""
    assert PLANNED


def test_a_planned_key_takes_its_default_alone(loaded, refused):
    """A part that does not exist must not be accepted and ignored."""
    for path in PLANNED:
        default = LEAVES[path].default
        assert value_at(loaded("", f"{path}={show(default)}"), path) == default
        section, _, name = path.partition(".")
        for text in others_than_default(path):
            for message in (refused("", f"{path}={text}"), refused(f"{section}:\n  {name}: {text}\n")):
                assert f"{path}: " in message
                assert f"is not implemented yet; only the default, {show(default)}, works" in message


def test_a_number_outside_its_range_is_refused_and_the_ends_are_kept():
    """An end that is read the wrong way round lets dropout 1 through, or refuses 0."""
    for path in RANGED:
        leaf = LEAVES[path]
        span = leaf.declared.metadata["span"]
        low, high = (float(end) for end in span[1:-1].split(","))
        kind = float if "float" in str(leaf.type) else int
        outside = [
            low - 1,
            2**31 if kind is int else None,
            high + 1 if high < 2**31 else 2 * high if high < float("inf") else None,
        ]
        if span.endswith(")") and high < 2**31:
            outside.append(high)
        if span.startswith("("):
            outside.append(low)
        for number in outside:
            if number is not None:
                assert f"{kind(number)} must be" in problem_of(leaf.declared, kind(number))
        inside = ([low] if span.startswith("[") else []) + ([high] if span.endswith("]") else [])
        assert all(problem_of(leaf.declared, kind(number)) is None for number in inside)


FITS = re.compile(r"(?:next valid value|smallest that fits|largest that fits) is (\d+)|try (\d+)")


@pytest.mark.parametrize(
    ("words", "key", "numbers", "fits"),
    [
        (("batch.global_size=6", "batch.accum_steps=4"), "batch.global_size", ("6", "4"), 8),
        (("batch.global_size=8", "batch.accum_steps=3"), "batch.global_size", ("8", "3"), 9),
        (("batch.global_size=1", "batch.accum_steps=16"), "batch.global_size", ("1", "16"), 16),
        (("model.kv_heads=3",), "model.kv_heads", ("3", "4"), 2),
        (("model.heads=6", "model.embed=96", "model.kv_heads=4"), "model.kv_heads", ("4", "6"), 3),
        (("model.kv_heads=9",), "model.kv_heads", ("9", "4"), 4),
        (("model.embed=66",), "model.embed", ("66", "4"), None),
        (("model.embed=250", "model.heads=6"), "model.embed", ("250", "6"), None),
        (("model.embed=3",), "model.embed", ("3", "4"), None),
        (("model.head_dim=7",), "model.head_dim", ("7",), 8),
        (("loss.chunks=7",), "loss.chunks", ("7", "512"), 4),
        (("loss.chunks=5000",), "loss.chunks", ("5000", "512"), 512),
        (("loss.chunks=4", "batch.sequence=31"), "loss.chunks", ("4", "31"), 1),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_next_that_fits(loaded, refused, words, key, numbers, fits):
    """The numbers are in the message, and the value that it suggests is then accepted (B10)."""
    message = refused("", *words)
    assert f"{key}: " in message
    assert all(re.search(rf"\b{number}\b", message) for number in numbers)
    found = FITS.search(message)
    assert found, message
    suggested = int(found[1] or found[2])
    assert fits in (suggested, None)
    assert value_at(loaded("", *words, f"{key}={suggested}"), key) == suggested


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 7])
def test_every_width_is_accepted_or_refused_with_one_that_is(tmp_path, refused, heads):
    """A suggestion that is refused in turn, because a head becomes odd, sends the user in circles (B10)."""
    path = tmp_path / "width.yml"
    path.write_text("")
    for embed in range(2, 41):
        words = (f"model.heads={heads}", f"model.embed={embed}")
        if embed % heads == 0 and embed // heads % 2 == 0:
            assert load(path, words).model.head_dim * heads == embed
            continue
        message = refused("", *words)
        found = FITS.search(message)
        assert found, message
        key = "model.head_dim" if "model.head_dim: " in message else "model.embed"
        load(path, (*words, f"{key}={found[1] or found[2]}"))


def test_a_given_head_width_frees_the_width_of_the_model(loaded):
    """The message says that it would, whatever the quotient is (B10)."""
    for embed in (100, 98, 97):
        model = loaded("", f"model.embed={embed}", "model.heads=3", "model.head_dim=32").model
        assert (model.embed, model.head_dim) == (embed, 32)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data.source=text",), "data.path"),
        (("data.path=x",), "data.path"),
        (("data.validation_path=x",), "data.validation_path"),
        (("mesh.data=0",), "mesh.data"),
        (("batch.accumulator=one_pass", "batch.accum_steps=2"), "batch.accumulator"),
        (("model.rope_scaling=llama3", "model.rope_low=4"), "model.rope_low"),
        (("run_name=a/b",), "run_name"),
        (("run_name=..",), "run_name"),
        (("output_dir=",), "output_dir"),
        (("optimizer.name=adafactor", "optimizer.mu_dtype=bfloat16"), "optimizer.mu_dtype"),
        (("optimizer.name=schedule_free_adamw", "optimizer.mu_dtype=bfloat16"), "optimizer.mu_dtype"),
        (("optimizer.name=sgd", "optimizer.mu_dtype=bfloat16"), "optimizer.mu_dtype"),
        (("optimizer.name=schedule_free_adamw", "optimizer.ema=0.9"), "optimizer.ema"),
        (("optimizer.name=schedule_free_adamw", "optimizer.b1=0"), "optimizer.b1"),
        (("optimizer.eps=0",), "optimizer.eps"),
        (("optimizer.b1=0.99999999",), "optimizer.b1"),
        (("optimizer.b2=0.99999999",), "optimizer.b2"),
        (("schedule.warmup_steps=1", "schedule.warmup_fraction=0.1"), "schedule.warmup_fraction"),
        (("schedule.decay_steps=0", "schedule.decay_fraction=0.1"), "schedule.decay_fraction"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(refused, words, key):
    """A pair that is accepted has one of the two ignored."""
    assert f": {key}: " in refused("", *words)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ("head/*", "must be a pattern, followed by"),
        ("head/* decay", "'decay' is not decay=D"),
        ("head/* decay=x", "expected a finite number, got 'x'"),
        ("head/* decay=-1", "'decay=-1' must be at least 0"),
        ("head/* decay=1e9", "'decay=1e9' must be at most 1000"),
        ("head/* rate=2", "'rate=2' is not decay=D"),
        ("head/* decay=1 decay=2", "sets decay twice"),
        ("head/* freeze decay=0", "freeze alone"),
        ("head/* freeze=1", "'freeze=1' is not decay=D"),
    ],
)
def test_a_group_that_cannot_be_read_is_refused(refused, group, says):
    """A word with a slip in it would leave the group as it was."""
    for message in (refused("", f"optimizer.groups={group}"), refused(f"optimizer: {{groups: ['{group}']}}")):
        assert ": optimizer.groups: " in message
        assert says in message


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), (0.95, 0.0)),
        (("optimizer.name=lion",), (0.99, 0.0)),
        (("optimizer.name=muon",), (0.95, 0.95)),
        (("optimizer.name=lion", "optimizer.b2=0.9"), (0.9, 0.0)),
        (("optimizer.name=muon", "optimizer.momentum=0"), (0.95, 0.0)),
    ],
)
def test_a_rule_has_its_published_memories_unless_they_are_given(loaded, words, values):
    """Lion with the second memory of AdamW, or muon without momentum, is another rule."""
    optimizer = loaded("", *words).optimizer
    assert (optimizer.b2, optimizer.momentum) == values


@pytest.mark.parametrize("text", ["a\0b", "a/b", ".", "..", "x" * 300])
def test_a_run_name_is_the_name_of_one_folder(refused, text):
    """What no file system takes is refused before anything is made."""
    assert "run_name: " in refused('run_name: "' + text.replace("\0", "\\0") + '"\n')


def test_an_output_folder_has_a_name_that_a_file_system_takes(refused):
    """A NUL byte is a traceback in every call that opens a file."""
    assert "output_dir: " in refused('output_dir: "a\\0b"\n')


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), (4, 64, 704)),
        (("model.embed=96", "model.heads=6"), (6, 16, 256)),
        (("model.kv_heads=2", "model.head_dim=8", "model.mlp=10"), (2, 8, 10)),
    ],
)
def test_sizes_of_zero_are_derived(loaded, words, sizes):
    """`kv_heads`, `head_dim` and `mlp` follow from width and heads unless they are given."""
    model = loaded("", *words).model
    assert (model.kv_heads, model.head_dim, model.mlp) == sizes


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        (("model.vocab=16383",), 1),
        (("model.vocab=16384",), 8),
        (("model.vocab=50257", "batch.sequence=63"), 7),
        (("model.vocab=50257", "batch.sequence=61"), 1),
        (("model.vocab=50257", "loss.chunks=2"), 2),
    ],
)
def test_chunks_of_the_loss_follow_the_vocabulary(loaded, words, chunks):
    """Chunking is on by default for large vocabularies and always divides the sequence."""
    assert loaded("", *words).loss_chunks == chunks
