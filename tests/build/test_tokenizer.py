"""Which tokenizer a run has, and the vocabulary that it needs (B35)."""

from dataclasses import replace

import pytest

from nnxtrain.build.program import make_program
from nnxtrain.build.registry import BUILT_IN, Registry
from nnxtrain.build.tokenizer import make_tokenizer, tokenizer_name
from nnxtrain.config.load import load
from nnxtrain.data.sources.synthetic import synthetic
from nnxtrain.data.sources.table import DATASETS
from nnxtrain.errors import ConfigError
from nnxtrain.tokenizers.byte import ByteTokenizer
from nnxtrain.tokenizers.ids import IdTokenizer
from nnxtrain.tokenizers.table import TOKENIZERS
from nnxtrain.types import SourceWithTokenizer
from tests.support import TINY, tiny

MINE = Registry(
    datasets=DATASETS | {"dna": synthetic},
    tokenizers=TOKENIZERS | {"letters": lambda config: IdTokenizer(30)},
)
OWN = MINE._replace(datasets=DATASETS | {"dna": SourceWithTokenizer(synthetic, lambda config, vocab: IdTokenizer(4))})


def config_of(registry: Registry, *words: str):
    """Returns the configuration of `tiny.yml` with names from `registry`."""
    return load(TINY, words, extra=registry.names())


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(name):
    """Its ids would be clamped; the vocabulary that the message suggests is enough."""
    size = TOKENIZERS[name](tiny().data).size
    words = ("data.source=text", "data.path=x", f"data.tokenizer={name}")
    with pytest.raises(ConfigError, match=rf"model\.vocab: {size - 1} is smaller than .*{size}$"):
        make_program(tiny(*words, f"model.vocab={size - 1}"))
    assert make_tokenizer(tiny(*words, f"model.vocab={size}"), BUILT_IN).size == size


def test_synthetic_tokens_are_any_ids_of_the_vocabulary():
    """`tiny.yml` has 256 ids, fewer than the bytes and their marks."""
    tokenizer = make_tokenizer(tiny("data.source=synthetic", "model.vocab=2"), BUILT_IN)
    assert (tokenizer.size, tokenizer.fingerprint) == (2, "ids-2")


def test_a_source_from_outside_may_have_a_path_and_ids_of_its_own():
    """It was told that only data.source=text reads a path, and held to the 259 ids of the byte tokenizer."""
    words = ("data.source=dna", "data.path=genome.fa", "data.validation_path=other.fa", "model.vocab=5")
    assert make_tokenizer(config_of(OWN, *words), OWN).size == 4
    assert make_tokenizer(config_of(MINE, *words, "data.tokenizer=letters", "model.vocab=30"), MINE).size == 30


@pytest.mark.parametrize(
    ("registry", "words", "whose"),
    [
        (MINE, ("data.source=dna",), "data.tokenizer=byte"),
        (MINE, ("data.source=dna", "data.tokenizer=letters"), "data.tokenizer=letters"),
        (OWN, ("data.source=dna", "data.tokenizer=letters"), "data.source=dna"),
    ],
)
def test_the_refusal_says_whose_entries_they_are(registry, words, whose):
    """With a source that brings its own, `data.tokenizer` is not what to change."""
    with pytest.raises(ConfigError, match=whose):
        make_tokenizer(config_of(registry, *words, "model.vocab=3"), registry)


def test_a_name_that_is_no_tokenizer_is_refused_with_those_from_outside():
    """The registry must tell the loader its names."""
    with pytest.raises(ConfigError, match="did you mean letters"):
        config_of(MINE, "data.tokenizer=leters")


def test_the_name_is_that_of_the_source_with_its_own_tokenizer_or_the_key():
    """The record in the run directory would name a tokenizer that was not used."""
    assert tokenizer_name(tiny(), BUILT_IN) == "synthetic"
    assert tokenizer_name(replace(tiny(), data=replace(tiny().data, source="stdlib")), BUILT_IN) == "byte"


def test_the_built_in_byte_tokenizer_is_that_of_its_name():
    """An entry must make what its name says."""
    assert isinstance(TOKENIZERS["byte"](tiny().data), ByteTokenizer)
