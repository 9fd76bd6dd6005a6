"""Where inductor keeps graphs and kernels of test runs: a folder for each version of the package.

Inductor finds a graph again by what was traced, its own settings and the ``uuid`` of our passes.
That names the sources of ``fsdp2/_compiled`` and of no other folder. A fault planted elsewhere that
changes what is made of a graph would not be seen in a graph that another version left. So the
folder's name has the sources of the whole package in it. It is not the one in the temporary folder
that inductor takes otherwise: that one is of all checkouts of a machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "inductor"
KEPT_S = 2 * 24 * 3600  # how long the folder of another version is left: a run may be using it


def folder_of_graphs() -> Path:
    """Return the folder for the package as it is now; remove old ones of other versions."""
    sources = hashlib.sha256()
    for file in sorted((ROOT / "fsdp2").rglob("*.py")):
        sources.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    chosen = FOLDER / sources.hexdigest()[:16]
    with contextlib.suppress(OSError):
        for other in FOLDER.iterdir():
            if other != chosen and time.time() - other.stat().st_mtime > KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
    return chosen
