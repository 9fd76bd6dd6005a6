"""Compiles the simulator, once for each torch, Python and state of its source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "csrc"
NAME = "fsdp2_sim"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]


class NoCompilerError(RuntimeError):
    """The simulator cannot be built here; the text says what is missing."""


def compiler() -> str:
    """Return the compiler, or raise NoCompilerError."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise NoCompilerError("no C++ compiler (g++, or what CXX names)")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        raise NoCompilerError(f"no headers of Python ({headers})")
    return found


@functools.cache
def build() -> Path:
    """Return the compiled simulator; compile it if nobody has. It lies in the environment."""
    sources = sorted(SOURCE.glob("*.cpp"))
    state = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for path in sorted(SOURCE.iterdir()):
        state.update(path.read_bytes())
    folder = Path(sys.prefix) / "var" / "fsdp2-sim" / state.hexdigest()[:16]
    target = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists():
        return target
    found = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # ranks begin together: one of them compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(found, sources, folder, target)
    return target


def _compile(found: str, sources: list[Path], folder: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    places = [f"-I{path}" for path in (*include, sysconfig.get_paths()["include"])]

    def compile_one(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        _run([found, *FLAGS, *places, "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    partial = folder / "partial.so"
    _run([found, "-shared", *objects, f"-L{root / 'lib'}", *libraries, "-o", str(partial)])
    partial.replace(target)  # whole, or not there
    for made in objects:
        Path(made).unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
