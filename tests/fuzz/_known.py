"""Defects that are known and not mended yet: what the fuzzer leaves out meanwhile.

One line each, with the reason. A line goes when its defect is mended; `--known` draws everything.
"""

from __future__ import annotations

import os

EVERYTHING = "FSDP2_FUZZ_KNOWN"  # set: draw what is known to fail, too

KNOWN = {
    "compiled-recomputed": "a compiled step outside of a compiler, with checkpointing",
}


def is_avoided(name: str) -> bool:
    """True if a defect of this name is known, and programs that meet it are not wanted."""
    assert name in KNOWN, f"no defect is called {name}"
    return not os.environ.get(EVERYTHING)
