"""Figures as people say them."""

BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def duration(seconds: float) -> str:
    """Returns `seconds` as people say it: `42 s`, `3 min 10 s`, `5 h 2 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def bytes_text(size: float | None) -> str:
    """Returns bytes as people read them, in the unit that fits; a dash for None."""
    if size is None:
        return "-"
    unit, scale = next((unit for unit in BYTE_UNITS if abs(size) >= unit[1]), ("B", 1))
    return f"{size / scale:,.2f} {unit}" if scale > 1 else f"{size:.0f} B"
