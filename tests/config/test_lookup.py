"""Names in open tables."""

import pytest

from nnxtrain.config.lookup import lookup
from nnxtrain.errors import ConfigError


def test_an_unknown_name_is_refused_with_key_choices_and_the_likely_fix():
    """A bare KeyError names neither."""
    assert lookup({"scan": 1}, "scan", key="batch.accumulator") == 1
    with pytest.raises(ConfigError, match=r"batch.accumulator: 'scna' is not one of scan, one; did you mean scan\?"):
        lookup({"scan": 1, "one": 2}, "scna", key="batch.accumulator")
