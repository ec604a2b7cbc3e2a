"""Peak rates by jax's names of chips."""

import pytest

from nnxtrain.compile.chips import peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("cpu", None),
        ("TPU v99", None),
    ],
)
def test_known_chips_have_a_peak_and_unknown_ones_none(kind, peak):
    """A made-up peak makes a made-up MFU."""
    assert peak_flops(kind) == peak
