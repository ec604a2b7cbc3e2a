"""Published figures of accelerators, per chip.

Sources: Google Cloud TPU system architecture pages; NVIDIA A100 (SXM, 80 GB), H100 (SXM), H200 and B200 data sheets.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """Peak figures of one chip, as published by its manufacturer.

    Attributes:
        peak_bf16_flops: bfloat16 matrix FLOP/s, dense.
        memory_bytes: of HBM, taking a published GB as 2**30 bytes. A program can use a little less: jax reports
            15.75 of the 16 GiB of a v5e.
        memory_bandwidth: bytes/s between HBM and the chip.
        link_bandwidth: bytes/s out of the chip through all its links to other chips together: ICI or NVLink, one way
            (NVIDIA's data sheets count both ways). A collective along one axis of a torus has only its share of them.
    """

    peak_bf16_flops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float


_V4 = Chip(275e12, 32 * 2**30, 1228e9, 2400e9 / 8)
_V5E = Chip(197e12, 16 * 2**30, 819e9, 1600e9 / 8)
_V5P = Chip(459e12, 95 * 2**30, 2765e9, 4800e9 / 8)
_V6E = Chip(918e12, 32 * 2**30, 1640e9, 3584e9 / 8)

CHIPS = {
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "NVIDIA A100": Chip(312e12, 80 * 2**30, 2039e9, 600e9 / 2),
    "NVIDIA H100": Chip(989e12, 80 * 2**30, 3350e9, 900e9 / 2),
    "NVIDIA H200": Chip(989e12, 141 * 2**30, 4800e9, 900e9 / 2),
    "NVIDIA B200": Chip(2250e12, 180 * 2**30, 8000e9, 1800e9 / 2),
}


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind` of jax, or None if it is not known; NVIDIA's have suffixes."""
    if device_kind in CHIPS:
        return CHIPS[device_kind]
    begins = [name for name in CHIPS if name.startswith("NVIDIA") and device_kind.startswith(name)]
    return CHIPS[begins[0]] if begins else None


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 matrix FLOP/s of a chip by its `device_kind`, or None if it is not known."""
    chip = chip_of(device_kind)
    return chip.peak_bf16_flops if chip else None
