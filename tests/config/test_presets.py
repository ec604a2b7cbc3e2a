"""Sizes of published models, and keys beside them."""

import pytest

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.load import load
from nnxtrain.config.presets import PRESETS
from nnxtrain.config.record import to_yaml

COUNTS = {  # parameters as their papers and model cards round them, in millions
    "gpt2-124m-like": 124,
    "llama2-7b": 6738,
    "llama2-13b": 13016,
    "llama2-70b": 68977,
    "llama3-8b": 8030,
    "llama3-70b": 70554,
    "llama3.1-8b": 8030,
    "llama3.2-1b": 1236,
}


def parameters(model) -> int:
    """Returns the weights of a decoder by arithmetic, the table without its padding."""
    attention = model.embed * model.head_dim * 2 * (model.heads + model.kv_heads)
    layer = attention + 3 * model.embed * model.mlp + 2 * model.embed
    return model.layers * layer + model.embed + model.vocab * model.embed * (1 if model.tied else 2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_sizes_of_its_model(loaded, name):
    """A wrong width or head count shows in the number of weights."""
    model = loaded(f"model: {{preset: {name}}}").model
    for key, value in PRESETS[name].items():
        assert getattr(model, key) == value
    assert parameters(model) / 1e6 == pytest.approx(COUNTS[name], rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_printing(loaded, write, name):
    """Derived sizes stand beside the preset in the printed file and must not change it."""
    config = loaded("", f"model.preset={name}", "batch.sequence=64")
    assert load(write(to_yaml(config))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_keys_of_the_model(name):
    """A misspelt size in the table would be an error at its first use."""
    for key, value in PRESETS[name].items():
        assert type(value) is LEAVES[f"model.{key}"].type


def test_keys_beside_a_preset_win(loaded):
    """From the file, from the command line, and from both; the order in the file does not matter."""
    config = loaded("model:\n  layers: 2\n  preset: llama2-7b\n  mlp: 128\n", "model.mlp=256", "model.vocab=300")
    assert (config.model.layers, config.model.mlp, config.model.vocab) == (2, 256, 300)
    assert (config.model.embed, config.model.heads) == (4096, 32)


def test_a_preset_on_the_command_line_is_weaker_than_keys_of_the_file(loaded):
    """Weakest first: defaults, preset, file, command line."""
    config = loaded("model: {preset: llama2-7b, layers: 2}", "model.preset=llama3-8b")
    assert config.model.layers == 2
    assert config.model.vocab == 128256
    assert value_at(config, "model.preset") == "llama3-8b"


def test_a_value_equal_to_the_default_still_beats_a_preset(loaded):
    """A merge that compares with the defaults would lose it."""
    assert loaded("", "model.preset=llama2-7b", "model.layers=4", "model.vocab=384").model.layers == 4


def test_an_unknown_preset_is_refused_with_the_names(refused):
    """The names of eight models are not known by heart."""
    message = refused("model:\n  preset: llama2-7\n")
    assert message.startswith("run.yml:2: model.preset: 'llama2-7' is not one of")
    assert all(name in message for name in PRESETS)
    assert message.endswith("did you mean llama2-7b?")
