"""What the codes of messages mean: a paragraph each, in the Markdown files of ``_core/errors``.

Owns how these files are read, and how a paragraph looks in a terminal. It must not know who raises
what. The manual shows the same files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CODE = re.compile(r"FS\d{3}")
FOLDER = Path(__file__).parents[1] / "errors"
WIDTH = 88

_HEADING = re.compile(rf"^## ({CODE.pattern})$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}([^*]+)\*{1,2}(?![\w*])")


@dataclass(frozen=True)
class Paragraph:
    """``title``: one sentence; ``text``: the Markdown below it; ``file``: where it stands."""

    code: str
    title: str
    text: str
    file: str

    @property
    def is_retired(self) -> bool:
        """True if no message has the code any more; the paragraph stays, for old logs."""
        return self.title.startswith("Retired")


def read_paragraphs() -> list[Paragraph]:
    """Return the paragraphs of all files in the order of their codes."""
    found = []
    for path in FOLDER.glob("*.md"):
        _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for code, body in zip(parts[::2], parts[1::2], strict=True):
            title, _, text = body.strip().partition("\n\n")
            found.append(Paragraph(code, title.strip("*"), text.strip(), path.name))
    return sorted(found, key=lambda paragraph: paragraph.code)


def in_terminal(paragraph: Paragraph) -> str:
    """Return a paragraph without what only Markdown needs; blocks of code stay as they are."""
    parts = [f"{paragraph.code}: {paragraph.title}"]
    for part in paragraph.text.split("\n\n"):
        plain = _EMPHASIS.sub(r"\1", _LINK.sub(r"\1", part))
        parts.append(part if part.startswith("```") else textwrap.fill(plain, WIDTH))
    return "\n\n".join(parts)


# ``python -m fsdp2 explain FS104``: what the code of a message means.


def main(arguments: Sequence[str]) -> None:
    """Print paragraphs. Ends with 2, and a word about it, if the arguments are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 explain",
        description="Say what the code of a message means, how one gets there, and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", nargs="*", help="as FS104, or a whole message; none: list all")
    given = parser.parse_args(arguments)
    try:
        _explain(parser, given.codes)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` does; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _explain(parser: argparse.ArgumentParser, codes: Sequence[str]) -> None:
    known = {paragraph.code: paragraph for paragraph in read_paragraphs()}
    if not codes:
        print("\n".join(f"{one.code}  {one.title}" for one in known.values()))
        return
    text = " ".join(codes)
    if re.fullmatch(r"[\d\s,]+", text):
        text = re.sub(r"\b(?=\d{3}\b)", "FS", text)
    asked = list(dict.fromkeys(CODE.findall(text.upper())))
    if not asked:
        parser.error(f"codes: expected one as FS104, found {' '.join(codes)!r}")
    unknown = [code for code in asked if code not in known]
    if unknown:
        parser.error(f"codes: there is no {', '.join(unknown)} in fsdp2 of this version")
    print("\n\n\n".join(in_terminal(known[code]) for code in asked))
