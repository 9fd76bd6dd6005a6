"""Explanations of message codes, from the Markdown files in ``_core/errors``.

Parses these files, which the manual also includes, and formats them for a terminal. Does not depend
on the code that raises the errors.
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
    """The explanation of a code: one sentence, the Markdown below it, and the source file."""

    code: str
    title: str
    text: str
    file: str

    @property
    def is_retired(self) -> bool:
        """Return True if no message uses the code any more; it may still appear in old logs."""
        return self.title.startswith("Retired")


def read_paragraphs() -> list[Paragraph]:
    """Return the paragraphs of all files, sorted by code."""
    found = []
    for path in FOLDER.glob("*.md"):
        _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        for code, body in zip(parts[::2], parts[1::2], strict=True):
            title, _, text = body.strip().partition("\n\n")
            found.append(Paragraph(code, title.strip("*"), text.strip(), path.name))
    return sorted(found, key=lambda paragraph: paragraph.code)


def in_terminal(paragraph: Paragraph) -> str:
    """Format a paragraph for a terminal: remove Markdown, except from code blocks."""
    parts = [f"{paragraph.code}: {paragraph.title}"]
    for part in paragraph.text.split("\n\n"):
        plain = _EMPHASIS.sub(r"\1", _LINK.sub(r"\1", part))
        parts.append(part if part.startswith("```") else textwrap.fill(plain, WIDTH))
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """Run ``python -m fsdp2 explain``. On invalid arguments, exit with status 2 and a message."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 explain",
        description="Explain message codes: meaning, typical causes and remedy.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", nargs="*", help="a code (FS104) or a message; default: all codes")
    given = parser.parse_args(arguments)
    try:
        _explain(parser, given.codes)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` closed early; Python flushes again at exit
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
        parser.error(f"codes: expected a code such as FS104, found {' '.join(codes)!r}")
    unknown = [code for code in asked if code not in known]
    if unknown:
        parser.error(f"codes: this version of fsdp2 has no {', '.join(unknown)}")
    print("\n\n\n".join(in_terminal(known[code]) for code in asked))
