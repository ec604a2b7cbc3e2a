"""Figures of chips by jax's names of them."""

import pytest

from nnxtrain.hardware.chips import CHIPS, Chip, chip_of, peak_flops


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


def test_the_figures_of_a_chip_are_in_plain_units():
    """A column in GB, in bits or with both ways of a link added makes a step look bound by the wrong thing."""
    assert chip_of("TPU v5 lite") == Chip(197e12, 16 * 2**30, 819e9, 200e9)
    assert chip_of("NVIDIA H100 80GB HBM3") == Chip(989e12, 80 * 2**30, 3350e9, 450e9)
    assert chip_of("TPU v99") is None


@pytest.mark.parametrize("kind", CHIPS)
def test_the_figures_of_each_chip_are_of_the_usual_proportions(kind):
    """Three figures of one row differ by known orders of magnitude, so that a slip of a unit shows."""
    chip = CHIPS[kind]
    assert 10 * 2**30 < chip.memory_bytes < 300e9
    assert 100 < chip.peak_bf16_flops / chip.memory_bandwidth < 700
    assert 2 < chip.memory_bandwidth / chip.link_bandwidth < 20
