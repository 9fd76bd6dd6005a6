"""The fenced blocks of Markdown pages, and what each one asks of a test.

Owns the convention that CONTRIBUTING tells authors: the language of a fence says what becomes of
the block, and a comment in the line above it says where that is not so, and why.

- ``python`` runs. The blocks of a page are one program, on two ranks.
- ``output`` is what the first rank printed since the block of output before: all of it, exactly.
- ``console`` has commands after ``$``, and under each what it prints. `python` and `torchrun` run.
- ``text`` and languages that nothing here can run are only shown.
- ``{name}`` is a directive of the generator, which checks it.

Comments: ``<!-- fragment: reason -->``: python that is parsed and not run. ``<!-- not run: reason
-->``: a command that is not run. ``<!-- file: path -->``: the python is that file, whole, which
commands run. ``<!-- ranks: 4 -->``: the page's program runs on so many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"

FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>\{?[\w-]*\}?)(?P<argument>.*)$")
MARK = re.compile(r"^<!-- (?P<name>fragment|not run|file): (?P<reason>.+) -->$")
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)

LANGUAGES = {"python", "output", "console", "text"}
"""What blocks of the manual may be: a block without a language would be checked by nobody."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its fence.

    `mark` is `fragment`, `not run`, `file` or nothing; `reason` is what the comment says after it.
    """

    page: str
    line: int
    language: str
    argument: str
    text: str
    mark: str = ""
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_directive(self) -> bool:
        return self.language.startswith("{")

    @property
    def runs(self) -> bool:
        return self.language == "python" and not self.mark


@dataclass(frozen=True)
class Command:
    """A line after ``$``, and what the page says that it prints."""

    words: tuple[str, ...]
    printed: str


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    name = str(page.relative_to(ROOT))
    lines = page.read_text().splitlines()
    found: list[Block] = []
    index = 0
    while index < len(lines):
        fence = FENCE.match(lines[index])
        if fence is None:
            index += 1
            continue
        start = index
        index += 1
        while index < len(lines) and lines[index].rstrip() != fence["ticks"]:
            index += 1
        assert index < len(lines), f"{name}:{start + 1}: a fence that nothing closes"
        mark = MARK.match(lines[start - 1]) if start else None
        found.append(
            Block(
                name,
                start + 1,
                fence["language"],
                fence["argument"].strip(),
                "".join(f"{line}\n" for line in lines[start + 1 : index]),
                mark["name"] if mark else "",
                mark["reason"] if mark else "",
            )
        )
        index += 1
    return found


def ranks_of(page: Path) -> int:
    """Return on how many ranks a page's program runs."""
    asked = RANKS.search(page.read_text())
    return int(asked[1]) if asked else 2


def commands(block: Block) -> list[Command]:
    """Return what a `console` block has a reader type."""
    found: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Command(tuple(line[2:].split()), ""))
        else:
            assert found, f"{block.place}: output before any command"
            found[-1] = Command(found[-1].words, f"{found[-1].printed}{line}\n")
    return found


def pages(*folders: str) -> list[Path]:
    """Return the pages of folders under `docs`, and of single files, in order."""
    found: list[Path] = []
    for folder in folders:
        place = DOCS / folder
        found += sorted(place.glob("**/*.md")) if place.is_dir() else [place]
    return found
