"""The example, in a rank to which accidents may happen: this is what torchrun starts.

Signals stand for what goes wrong inside of a rank, at whatever line it is then.
"""

from __future__ import annotations

import faulthandler
import resource
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "train_lm.py"
RAISE, FILL_MEMORY = signal.SIGUSR1, signal.SIGUSR2


def _raise(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("an accident: an exception in one rank")


def _fill_memory(number: int, frame: FrameType | None) -> None:
    """Take memory until there is no more: of what this process may have, 64 MiB are left."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    while True:
        held.append(bytearray(4 << 20))


if __name__ == "__main__":
    faulthandler.enable()  # so that an abort of a run that hangs says where
    signal.signal(RAISE, _raise)
    signal.signal(FILL_MEMORY, _fill_memory)
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
