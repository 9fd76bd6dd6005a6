"""What every benchmark hands over: figures, where they come from, as a Markdown table and as JSON.

Owns the form of a result, its files, and the command line that all benchmarks share.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.models import LIBRARIES, OURS

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"


@dataclass(frozen=True)
class Origin:
    """Where a table's numbers come from. `interpreter` tells builds of one version apart."""

    command: str
    commit: str
    torch: str
    python: str
    interpreter: str = ""
    machine: str = ""

    def to_markdown(self) -> str:
        return (
            f"`{self.command}`: torch {self.torch}, Python {self.python}, commit {self.commit}; "
            f"{self.machine}"
        )


@dataclass(frozen=True)
class Figure:
    """One number of a table.

    `case` and `variant` name its row, `quantity` (with the unit) its column. Less is better in
    every quantity that is gated. `is_gated`: deterministic and ours, so that a rise is a change of
    the package.
    """

    case: str
    variant: str
    quantity: str
    value: float
    is_gated: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.variant, self.quantity

    def show(self) -> str:
        shown = show_number(self.value)
        if self.low is None or self.high is None:
            return shown
        return f"{shown} ({show_number(self.low)} to {show_number(self.high)})"


@dataclass(frozen=True)
class Result:
    """What one benchmark found."""

    benchmark: str
    origin: Origin
    figures: list[Figure]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        notes = [f"- {note}" for note in self.notes]
        return "\n\n".join(
            part for part in (self.origin.to_markdown(), self.to_table(), "\n".join(notes)) if part
        )

    def to_table(self) -> str:
        """Return one row for each case and variant, one column for each quantity."""
        columns = list(dict.fromkeys(figure.quantity for figure in self.figures))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for figure in self.figures:
            rows.setdefault((figure.case, figure.variant), {})[figure.quantity] = figure.show()
        header = ("case", "variant", *columns)
        return to_table(
            header,
            [(*row, *(cells.get(name, "") for name in columns)) for row, cells in rows.items()],
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Result:
        data = json.loads(path.read_text())
        data["origin"] = Origin(**data["origin"])
        data["figures"] = [Figure(**figure) for figure in data["figures"]]
        return Result(**data)

    def save(self) -> None:
        """Write the result to where results are kept, to be committed."""
        RESULTS.mkdir(exist_ok=True)
        self.write(RESULTS / f"{self.benchmark}.json")
        text = f"# {self.benchmark}\n\n{self.to_markdown()}\n"
        (RESULTS / f"{self.benchmark}.md").write_text(text)


@dataclass(frozen=True)
class Measured:
    """What a benchmark's own code returns.

    `failed` makes the command end with 1; `suffix` tells results of one benchmark apart.
    """

    figures: list[Figure]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: bool = False
    suffix: str = ""


def run(
    name: str,
    description: str | None,
    measure: Callable[[argparse.Namespace], Measured],
    parser: argparse.ArgumentParser | None = None,
) -> Result:
    """Be the command line of a benchmark: measure, print, and write what was asked for."""
    parser = parser or make_parser(name, description)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers here")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # when it runs depends on what ran before
    measured = measure(arguments)
    origin = find_origin(name)
    result = Result(
        name + measured.suffix, origin, measured.figures, measured.settings, measured.notes
    )
    print(result.to_markdown())
    if arguments.json is not None:
        result.write(arguments.json)
    if measured.failed:
        sys.exit(1)
    if arguments.save:
        result.save()
    return result


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the choice of variants that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=(description or "").split("\n")[0]
    )
    parser.add_argument(
        "--libraries",
        type=parse_libraries,
        default=list(LIBRARIES),
        help="comma-separated, of: " + ", ".join(LIBRARIES),
    )
    return parser


def parse_libraries(text: str) -> list[str]:
    """Split a list; the plain model, which others are compared with, is always the first."""
    chosen = {"plain", *text.split(",")}
    if unknown := chosen - set(LIBRARIES):
        raise argparse.ArgumentTypeError(f"expected some of {LIBRARIES}, found {sorted(unknown)}")
    return [name for name in LIBRARIES if name in chosen]


def gated(library: str) -> bool:
    """Say whether a deterministic figure of a variant is one that CI looks at."""
    return library == OURS


def module_of(name: str) -> str:
    """Return the module of a benchmark; what helps them, and the stages on a GPU, are none."""
    found = (REPOSITORY / "benchmarks").glob(f"*/{name}.py")
    (path,) = (path for path in found if path.parent.name not in ("kit", "gpu"))
    return f"benchmarks.{path.parent.name}.{name}"


def find_origin(name: str) -> Origin:
    """Describe the current run of a benchmark, without names of hosts or folders."""
    arguments = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return Origin(
        command=shlex.join(["scripts/bench", name, *arguments]),
        commit=_find_commit(),
        torch=version("torch"),
        python=platform.python_version(),
        interpreter=f"{' '.join(platform.python_build())}, {platform.python_compiler()}",
        machine=_describe_machine(),
    )


def _find_commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return commit + (" with changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _describe_machine() -> str:
    """Return CPU model, cores and memory."""
    model, memory = platform.machine(), "?"
    if (cpuinfo := Path("/proc/cpuinfo")).exists() and (
        match := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
    ):
        model = match[1]
    if (meminfo := Path("/proc/meminfo")).exists() and (
        match := re.search(r"MemTotal:\s*(\d+) kB", meminfo.read_text())
    ):
        memory = f"{int(match[1]) / 2**20:.0f}"
    return f"{model}, {os.cpu_count()} cores, {memory} GiB"


def show_number(value: float) -> str:
    """Return three significant digits, or all digits of the integer part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: columns of words left, the others right."""
    words = [
        all(not re.match(r"[-\d]", row[i]) for row in rows if row[i]) for i in range(len(header))
    ]
    lines = [header, ["---" if word else "---:" for word in words], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
