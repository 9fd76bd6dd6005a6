"""How programs of torch's own FSDP2 run beside ours, in processes of their own.

Of such runs on gloo about one in ten ends with SIGABRT after its last line, and ``terminate called
without an active exception`` (torch 2.13.0: 4 of 50 ranks on an idle machine). The cause is told at
`fsdp2._core.base.torch_comm.pause_at_exit`, which programs that use this package have. Those that
run without it get the same pause from outside, and stay as their users wrote them.
"""

from __future__ import annotations

import os
from pathlib import Path

PAUSING = Path(__file__).parent / "pausing"


def with_pause(path: str) -> str:
    """Return the PYTHONPATH that gives torch's threads a moment at the end of each process."""
    return os.pathsep.join((str(PAUSING), path))
