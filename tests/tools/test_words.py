"""Words of a tool beside keys of the configuration."""

import pytest

from nnxtrain.errors import ConfigError
from tools.words import split_words


def test_own_words_win_and_the_rest_is_passed_on():
    """`seed` of a tool is not the seed of the run."""
    values, rest = split_words(["seed=3", "model.layers=2", "report=a=b"], {"seed": 0, "report": "", "rounds": 5})
    assert values == {"seed": 3, "report": "a=b", "rounds": 5}
    assert rest == ["model.layers=2"]


def test_a_value_of_another_type_is_refused():
    """A traceback names neither the word nor the type."""
    with pytest.raises(ConfigError, match="rounds=many: expected int, got 'many'"):
        split_words(["rounds=many"], {"rounds": 5})
