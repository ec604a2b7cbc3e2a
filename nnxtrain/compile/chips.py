"""Public figures of accelerators.

Sources: Google Cloud TPU system architecture pages; NVIDIA A100, H100, H200 and B200 data sheets (dense figures).
"""

PEAK_BF16_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 matrix FLOP/s of a chip by jax's name of it, or None where it is not known."""
    if device_kind in PEAK_BF16_FLOPS:
        return PEAK_BF16_FLOPS[device_kind]
    begins = [name for name in PEAK_BF16_FLOPS if name.startswith("NVIDIA") and device_kind.startswith(name)]
    return PEAK_BF16_FLOPS[begins[0]] if begins else None
