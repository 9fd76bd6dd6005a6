"""What the codes of messages mean: a paragraph each, in the Markdown files of ``fsdp2/_errors``.

Owns how these files are read, and how a paragraph looks in a terminal. It must not know who raises
what. The manual shows the same files.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

CODE = re.compile(r"FS\d{3}")
FOLDER = Path(__file__).parents[1] / "_errors"
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
