"""Sizes as people read them. Owns the words; it must not know what has the size."""

from __future__ import annotations

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def nbytes_text(nbytes: int) -> str:
    """Return a size with the unit that fits it."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
