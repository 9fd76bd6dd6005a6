"""Say which private names of torch the package uses, and what each torch has of them.

`scripts/private-names` prints the table. `private_uses.py` finds the names in the source
(`_core/base/torch_*.py` alone may have them); a small program, `probe_names.py`, runs with the
interpreter of every environment that the scripts made, and with `FSDP2_PYTHON`, and looks them up.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.private_uses import Use, uses_of_the_package

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("probe_names.py")


# --- the environments -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """What one torch has: of each name that exists, what is known of it as a text."""

    version: str
    there: Mapping[str, str]

    @property
    def number(self) -> tuple[int, ...]:
        return version_number(self.version)


def version_number(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9.]+", version)
    assert found, version
    return tuple(int(part) for part in found[0].split(".") if part)


def interpreters(root: Path, own: str | None) -> list[Path]:
    """Return those of the environments that scripts made, and the user's own."""
    found = [root / ".venv", *sorted((root / ".venvs").glob("torch-*"))]
    made = [folder / "bin" / "python" for folder in found]
    return [*(path for path in made if path.exists()), *([Path(own)] if own else [])]


def probe(interpreter: Path, names: Sequence[str]) -> Torch | None:
    """Ask an interpreter's torch for the names; None, with a word, if there is none to ask."""
    ended = subprocess.run(
        [str(interpreter), str(PROBE)],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        print(f"{interpreter} was left out: {ended.stderr.strip()[-500:]}", file=sys.stderr)
        return None
    told = json.loads(ended.stdout.splitlines()[-1])
    return Torch(told["version"], told["there"])


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One name: where it is used, and what is to be said of it for each torch."""

    name: str
    where: str
    is_guarded: bool
    cells: tuple[str, ...]


def compare(uses: Sequence[Use], torchs: Sequence[Torch]) -> list[Row]:
    """Return a row for each name; the oldest torch that has it is what others are compared with."""
    places: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        places[use.name].append(use)
    rows = []
    for name, used in sorted(places.items()):
        if any(other.startswith(f"{name}.") for other in places):
            continue  # only a step on the way to others
        signatures = [torch.there.get(name) for torch in torchs]
        reference = next((s for s in signatures if s is not None), None)
        cells = tuple(
            "missing" if s is None else "same" if s == reference else f"changed: {s}"
            for s in signatures
        )
        where = ", ".join(
            f"{file}:{','.join(str(u.line) for u in used if u.file == file)}"
            for file in dict.fromkeys(u.file for u in used)
        )
        rows.append(Row(name, where, all(u.is_guarded for u in used), cells))
    return rows


def oldest_supported(pyproject: str) -> tuple[int, ...]:
    found = re.search(r'^dependencies = \["torch>=([0-9.]+)"', pyproject, re.MULTILINE)
    assert found, "pyproject.toml does not say which torch it needs"
    return version_number(found[1])


def unguarded(
    rows: Sequence[Row], torchs: Sequence[Torch], oldest: tuple[int, ...]
) -> list[tuple[str, str]]:
    """Return names and the supported versions that lack them, where the code does not say so."""
    return [
        (row.name, torch.version)
        for row in rows
        for torch, cell in zip(torchs, row.cells, strict=True)
        if cell == "missing" and not row.is_guarded and torch.number >= oldest
    ]


def table(rows: Sequence[Row], torchs: Sequence[Torch]) -> str:
    lines = [["name", "where", "guarded", *(torch.version for torch in torchs)]]
    lines += [[r.name, r.where, "yes" if r.is_guarded else "", *r.cells] for r in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    widths[3:] = [max(len(torch.version), len("missing")) for torch in torchs]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/private-names", description=__doc__)
    parser.add_argument("--changed", action="store_true", help="only what is not the same in all")
    options = parser.parse_args(arguments)
    uses = uses_of_the_package()
    names = sorted({use.name for use in uses})
    found: dict[str, Torch] = {}
    for path in interpreters(ROOT, os.environ.get("FSDP2_PYTHON")):
        torch = probe(path, names)
        if torch is not None:
            found.setdefault(torch.version, torch)
    torchs = sorted(found.values(), key=lambda torch: torch.number)
    rows = compare(uses, torchs)
    shown = [row for row in rows if not options.changed or set(row.cells) != {"same"}]
    print(table(shown, torchs))
    print(f"\n{len(rows)} names; those that begin with a dot are attributes of torch's objects")
    bad = unguarded(rows, torchs, oldest_supported((ROOT / "pyproject.toml").read_text()))
    for name, version in bad:
        print(f"torch {version} is supported and has no {name}, and nothing guards its use")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
