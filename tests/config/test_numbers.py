"""Numbers far out of range are refused by their own key, not by what breaks later."""

import struct

import pytest

from nnxtrain.config.checks import LEAVES
from tests.config.values import kind_of

NUMBERS = [path for path in LEAVES if kind_of(path) in (int, float)]
FAR = ("1e300", "1e38", "-1e300", "-1e38", str(2**62), str(-(2**62)), "1e-300")
HARMLESS = {  # what is accepted, and why it does no harm
    ("optimizer.learning_rate", "1e38"): "a loss that is not finite names this key; smaller ones break a run as well",
    ("optimizer.learning_rate", str(2**62)): "a loss that is not finite names this key",
}


def test_a_number_far_out_of_range_is_refused_by_its_own_key(refused, loaded):
    """`optimizer.weight_decay=1e300` ended as a loss that is not finite, and blamed the learning rate."""
    for path in NUMBERS:
        for text in FAR:
            word = f"{path}={text}"
            if (path, text) in HARMLESS:
                assert loaded("", word)
                continue
            message = refused("", word)
            assert message.startswith(f"command line '{word}': {path}: ")
            assert "\n" not in message
            value = float(text)
            assert text in message or str(value) in message


def test_every_number_has_a_span_that_float32_holds():
    """A key without a bound is a key without a refusal; a bound of more than float32 holds is none."""
    for path in NUMBERS:
        rule = LEAVES[path].declared.metadata
        if rule["planned"]:
            continue
        low, high = (float(end) for end in rule["span"][1:-1].split(","))
        if kind_of(path) is float:
            assert struct.unpack("f", struct.pack("f", high))[0] == pytest.approx(high, rel=1e-6)
        assert low > -2


@pytest.mark.parametrize("word", ["decay=1e300", "rate_scale=1e38", "decay=1001", "decay=-1e300", "rate_scale=2000"])
def test_a_number_of_a_group_is_held_to_a_range_too(refused, word):
    """The decay of a group breaks a run as that of all does."""
    message = refused("", f"optimizer.groups=head/* {word}")
    assert ": optimizer.groups: 'head/* " in message
    assert word.partition("=")[2] in message


@pytest.mark.parametrize("path", ["model.dropout", "optimizer.b1", "optimizer.momentum", "optimizer.ema"])
def test_a_share_that_float32_rounds_to_one_is_refused(refused, path):
    """Nothing would be kept, and the average never move: 0.99999999 is 1 in float32."""
    name = "sgd" if path.endswith("momentum") else "adamw"
    assert f": {path}: 0.99999999 must be at most" in refused("", f"optimizer.name={name}", f"{path}=0.99999999")
