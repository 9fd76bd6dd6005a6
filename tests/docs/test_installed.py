"""What pip installs runs the README's program, also beside a clone whose folder is named fsdp2.

Such a folder is a package of its own for Python, an empty one. `scripts/docs test` runs this; it is
skipped where pip cannot build without a network: setuptools has to be there.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs._blocks import ROOT, read_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(importlib.metadata.version("setuptools").partition(".")[0]) < 77,
        reason="the installed setuptools is older than pyproject.toml asks for",
    ),
]
LIBRARIES = sysconfig.get_paths()["purelib"]
"""Where torch is: on the path behind what the test installs."""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("how", ["a wheel", "in place"])
def test_hello_beside_the_clone(how: str, tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, tmp_path / "fsdp2", cwd=tmp_path)
    (program,) = (b.text for b in read_blocks(ROOT / "README.md") if b.language == "python")
    (tmp_path / "hello.py").write_text(program)
    (shown,) = (b.text for b in read_blocks(ROOT / "README.md") if b.language == "console")
    run(sys.executable, "-m", "venv", "--without-pip", "v", cwd=tmp_path)
    python = tmp_path / "v" / "bin" / "python"
    (site,) = (tmp_path / "v").glob("lib/python*/site-packages")
    common = ("--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", *common)
    with_torch = {"PYTHONPATH": LIBRARIES}
    if how == "a wheel":
        wheels = tmp_path / "wheels"
        run(*pip[:3], "wheel", *common, "-w", wheels, tmp_path / "fsdp2", cwd=tmp_path)
        (wheel,) = wheels.glob("fsdp2-*.whl")
        run(*pip, wheel, cwd=tmp_path)
        where = site / "fsdp2"
    else:
        run(*pip, "-e", tmp_path / "fsdp2", cwd=tmp_path, **with_torch)
        where = tmp_path / "fsdp2" / "fsdp2"
    asked = run(
        python, "-c", "import fsdp2; print(fsdp2.__file__)", cwd=tmp_path, **with_torch
    )  # from the folder that has both
    assert Path(asked.strip()).parent == where
    launch = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "hello.py")
    said = run(*launch, cwd=tmp_path, OMP_NUM_THREADS="1", **with_torch)
    (expected,) = (line for line in shown.splitlines() if not line.startswith("$"))
    # two ranks write, maybe at once: their words may alternate
    assert sorted("".join(said.split())) == sorted("".join(expected.split()) * 2), said
