"""A recorded configuration derives afresh; what another version recorded is compared as far as it goes."""

import pytest
import yaml

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.load import DERIVABLE, load
from nnxtrain.config.presets import MESH_PRESETS, PRESETS
from nnxtrain.config.record import as_mapping, differences, recorded, to_yaml

OVERRIDES = [
    ("model.preset=llama3-8b",),
    ("model.preset=gpt2-124m-like", "model.layers=3"),
    ("optimizer.name=lion",),
    ("optimizer.name=muon",),
    ("model.embed=128",),
    ("model.heads=2",),
    ("mesh.preset=zero1",),
    ("mesh.preset=null",),
    ("model.preset=null",),
]


@pytest.mark.parametrize("override", OVERRIDES, ids=" ".join)
@pytest.mark.parametrize(
    "first",
    [(), ("model.preset=llama2-7b", "mesh.preset=fsdp_tensor"), ("model.layers=2", "optimizer.name=muon")],
    ids=["defaults", "presets", "sizes"],
)
def test_a_recorded_configuration_derives_afresh(loaded, write, first, override):
    """Sizes written back as if somebody had given them keep the model of yesterday under today's name."""
    file = write(to_yaml(loaded("", *first)), "config.yml")
    assert load(file, ["run_name=run", *override]) == loaded("", *first, *override)


def test_what_somebody_gave_stays_given(loaded, write):
    """A size that happens to be the derived one is no less given."""
    words = ("model.mlp=704", "model.preset=llama3-8b", "model.layers=32", "optimizer.b2=0.95")
    config = load(write(to_yaml(loaded("", *words)), "config.yml"), ["optimizer.name=lion", "model.preset=null"])
    assert (config.model.mlp, config.model.layers, config.optimizer.b2) == (704, 32, 0.95)
    assert config.model.embed == LEAVES["model.embed"].default


def test_a_number_that_was_changed_by_hand_counts(loaded, write):
    """The mark behind a number must not undo an edit of the file."""
    text = to_yaml(loaded(""))
    assert "  mlp: 704  # filled in\n" in text
    config = load(write(text.replace("mlp: 704", "mlp: 512"), "config.yml"))
    assert config.model.mlp == 512


@pytest.mark.parametrize("preset", [None, "llama3.2-1b"])
def test_a_recorded_configuration_is_resolved_for_every_reader_of_yaml(loaded, preset):
    """Scripts read sizes from `config.yml`; zeros would tell them nothing."""
    config = loaded("", f"model.preset={preset or 'null'}")
    found = yaml.safe_load(to_yaml(config))
    flat = {
        (f"{name}.{leaf}" if isinstance(value, dict) else name): (value[leaf] if isinstance(value, dict) else value)
        for name, value in found.items()
        for leaf in (value if isinstance(value, dict) else (name,))
    }
    assert flat == as_mapping(config)


def test_only_what_a_preset_or_another_key_decides_is_filled_in(loaded):
    """A key that is missing here is written back as if it had been given."""
    for section, presets in (("model", PRESETS), ("mesh", MESH_PRESETS)):
        assert {f"{section}.{name}" for preset in presets.values() for name in preset} <= DERIVABLE
    config = loaded("")
    moved = loaded("", "model.embed=512", "model.heads=8", "optimizer.name=muon")
    derived = {path for path in LEAVES if value_at(config, path) != value_at(moved, path)}
    assert derived - {"model.embed", "model.heads", "optimizer.name"} <= DERIVABLE


def test_the_record_of_another_version_is_compared_as_far_as_it_goes(loaded, write):
    """A renamed key, or a new one, made every old run a configuration error."""
    config = loaded("", "steps=7")
    text = to_yaml(config)
    assert differences(recorded(write(text, "config.yml")), as_mapping(config)) == []
    text = text.replace("steps: 7\n", "steps: 8\nold_key: [1, {a: b}]\n").replace("  norm_eps: 1.0e-05\n", "")
    text = text.replace("name: adamw", "name: an_old_rule").replace("global_size: 8", "global_size: many")
    assert differences(recorded(write(text, "config.yml")), as_mapping(config)) == [
        "steps: 8 → 7",
        "batch.global_size: many → 8",
        "optimizer.name: an_old_rule → adamw",
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"- a\n"])
def test_a_record_that_cannot_be_read_is_no_record(write, content):
    """Of a damaged file nothing can be said; defaults would all look like changes."""
    assert recorded(write(content, "config.yml")) == {}
