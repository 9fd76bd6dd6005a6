"""Count instructions of chosen stretches of a Python program with valgrind's callgrind.

Owns the C shim that opens and closes a counting window from inside the program, the valgrind
command line, and the reading of what callgrind writes. Knows nothing of torch.

A window is instrumented only while it is open, so imports and warm-up run at a fraction of
callgrind's usual slowness. Each closed window becomes one dump file, labelled by the program.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHIM_VARIABLE = "FSDP2_CALLGRIND_SHIM"

# Client requests are a few instructions that do nothing outside valgrind.
_SHIM_SOURCE = r"""
#include <valgrind/callgrind.h>
void window_open(void) {
    CALLGRIND_ZERO_STATS;
    CALLGRIND_START_INSTRUMENTATION;
}
void window_close(const char *label) {
    CALLGRIND_STOP_INSTRUMENTATION;
    CALLGRIND_DUMP_STATS_AT(label);
}
"""


def find_missing_tools() -> list[str]:
    """Return the programs that counting needs and this machine lacks."""
    return [tool for tool in ("valgrind", "gcc") if shutil.which(tool) is None]


def build_shim(folder: Path) -> Path:
    """Compile the shim into `folder`; raise `RuntimeError` naming what this machine lacks."""
    if missing := find_missing_tools():
        raise RuntimeError(
            f"{' and '.join(missing)} not found: counting instructions needs valgrind with its "
            "headers, and gcc."
        )
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM_SOURCE)
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"The callgrind shim does not compile (are valgrind's headers there?):\n{done.stderr}"
        )
    return library


def command_under_callgrind(command: list[str], prefix: Path) -> list[str]:
    """Return `command` run by callgrind, its dumps written to `prefix`.1, .2 and so on."""
    valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", "--dump-line=no"]
    return [*valgrind, f"--callgrind-out-file={prefix}", *command]


class Counter:
    """The program's side: open and close windows through the shim named by the environment."""

    def __init__(self) -> None:
        self._shim = ctypes.CDLL(os.environ[SHIM_VARIABLE])

    @contextmanager
    def window(self, label: str) -> Iterator[None]:
        """Count what runs inside under `label`."""
        name = label.encode()
        self._shim.window_open()
        try:
            yield
        finally:
            self._shim.window_close(name)


def find_dumps(prefix: Path) -> dict[str, Path]:
    """Return the dump file of each label that the program closed a window under."""
    dumps = {}
    for path in prefix.parent.glob(prefix.name + ".*"):
        with path.open() as lines:
            for line in lines:
                if match := re.match(r"desc: Trigger: Client Request: (.+)", line):
                    dumps[match[1]] = path
                if line.startswith("fn="):
                    break
    return dumps


def read_total(dump: Path) -> int:
    """Return the instructions that a dump holds."""
    for line in reversed(dump.read_text().splitlines()):
        if match := re.match(r"(?:totals|summary): (\d+)", line):
            return int(match[1])
    raise ValueError(f"{dump} has no totals line: the program ended inside a window.")
