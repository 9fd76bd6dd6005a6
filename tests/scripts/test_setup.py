"""`scripts/_setup.sh`: `--torch` and `--python` choose an environment, and what goes wrong is said.

Interpreters are shell scripts here, so that nothing is installed and no torch is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

PROGRAM = """\
set -euo pipefail
. scripts/_setup.sh
use_environment test
echo "$python | $*"
"""

# What makes an environment (`-m venv FOLDER`), is its interpreter, and plays pip there.
INTERPRETER = """\
#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip --version") ;;
"-m pip install "*)
    echo "$*" | sed 's/.*--log [^ ]* //' >>installed.txt
    echo "2026-01-01 The user requested (constraint) torch<=2.14.1" >"$7"
    [ ! -e refuse ] ;;
*"print(torch.__version__)") echo "2.15.0+cpu" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the script reads, and an interpreter that installs nothing."""
    (tmp_path / "scripts").mkdir()
    for name in ("_setup.sh", "clients.txt"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("")
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    (tmp_path / "program").write_text(PROGRAM)
    return tmp_path


def run(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "FSDP2_PYTHON"}
    return subprocess.run(
        ["bash", "program", *arguments],
        cwd=checkout,
        env={**inherited, "PYTHON": str(checkout / "interpreter"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "folder", "torch", "left"),
    [
        ("--torch 2.15 -k ties", ".venvs/torch-2.15.0", "torch==2.15.0", "-k ties"),
        ("--torch=2.11 -x", ".venvs/torch-2.11.0", "torch==2.11.0", "-x"),
        ("--torch 2.14.0", ".venvs/torch-2.14.0", "torch==2.14.0", ""),
        ("--python 3.10 -x", ".venvs/python-3.10", None, "-x"),
        ("--torch 2.15 --python=3.13", ".venvs/torch-2.15.0-python-3.13", "torch==2.15.0", ""),
        ("-k ties --torch", ".venv", None, "-k ties --torch"),
    ],
)
def test_an_environment_for_a_version(
    checkout: Path, arguments: str, folder: str, torch: str | None, left: str
) -> None:
    """Options are the first arguments; a second run finds what the first one made."""
    for _ in range(2):
        ended = run(checkout, *arguments.split())
        assert ended.stdout == f"{checkout}/{folder}/bin/python | {left}\n", ended.stderr
    first, second = (checkout / "installed.txt").read_text().splitlines()
    assert torch is None or first == torch
    assert second == "-e .[test]"


def test_versions_share_nothing(checkout: Path) -> None:
    for arguments in ([], ["--torch", "2.13"], ["--torch", "2.15"]):
        run(checkout, *arguments)
    assert len((checkout / "installed.txt").read_text().splitlines()) == 2 * 3


@pytest.mark.parametrize("version", ["2.16", "2.1", "2.15.", "2.15.0.1", "2x15", "new", ""])
def test_a_version_that_is_not_supported(checkout: Path, version: str) -> None:
    ended = run(checkout, "--torch", version)
    assert ended.returncode == 1
    assert "2.11.0" in ended.stderr
    assert f"found '{version}'" in ended.stderr
    assert not (checkout / ".venvs").exists()


def test_an_interpreter_of_ones_own_has_the_version(checkout: Path) -> None:
    interpreter = str(checkout / "interpreter")
    for version in ("2.15", "2.15.0"):
        ended = run(checkout, "--torch", version, FSDP2_PYTHON=interpreter)
        assert ended.stdout == f"{interpreter} | \n", ended.stderr
    ended = run(checkout, "--torch", "2.13", FSDP2_PYTHON=interpreter)
    assert ended.returncode == 1
    assert "has torch 2.15.0+cpu, and --torch asks for 2.13" in ended.stderr
    assert run(checkout, FSDP2_PYTHON=interpreter).returncode == 0


def test_pip_refuses_a_version(checkout: Path) -> None:
    """A constraint is named, with the way to lift it; the next run tries again."""
    (checkout / "refuse").touch()
    ended = run(checkout, "--torch", "2.15")
    assert ended.returncode == 1
    assert "could not install torch==2.15.0" in ended.stderr
    assert "(constraint) torch<=2.14.1" in ended.stderr
    assert "PIP_CONFIG_FILE=/dev/null" in ended.stderr
    (checkout / "refuse").unlink()
    assert run(checkout, "--torch", "2.15").returncode == 0


CLIENTS = """\
set -euo pipefail
. scripts/_setup.sh
use_clients && echo "$python"
"""


def test_libraries_of_clients_are_apart(checkout: Path) -> None:
    """They have an environment of their own; one that cannot be had is named, the others stay."""
    (checkout / "program").write_text(CLIENTS)
    for _ in range(2):
        ended = run(checkout)
        assert ended.stdout == f"{checkout}/.venvs/clients/bin/python\n", ended.stderr
    installed = (checkout / "installed.txt").read_text().splitlines()
    assert len(installed) == 3
    assert installed[-1].endswith("-c .venvs/clients/constraints.txt -r scripts/clients.txt")


def test_a_library_that_cannot_be_had(checkout: Path) -> None:
    (checkout / "program").write_text(CLIENTS)
    interpreter = checkout / "interpreter"
    refusing = 'case "$*" in *clients.txt | *torchtitan*) exit 1 ;; esac\ncase "$*" in'
    interpreter.write_text(INTERPRETER.replace('case "$*" in', refusing, 1))
    ended = run(checkout)
    assert ended.returncode == 0, ended.stderr
    assert "cannot be had: torchtitan==" in ended.stderr
    assert "cannot be had: transformers" not in ended.stderr
