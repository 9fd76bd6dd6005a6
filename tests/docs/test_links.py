"""Links between the Markdown files of the repository lead to files, and to headings in them.

The generator checks its own pages; this needs no generator, and reads every file, as a code host
shows them.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs._blocks import ROOT

FENCED = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IN_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^()\s>]+)>?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)


def markdown_files() -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:  # no repository: what was unpacked from an archive
        return sorted(path for path in ROOT.glob("**/*.md") if ".venv" not in str(path))
    return sorted(path for name in found.stdout.split() if (path := ROOT / name).is_file())


FILES = markdown_files()


def prose(path: Path) -> str:
    return COMMENT.sub("", FENCED.sub("", path.read_text()))


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Return what a code host calls the headings of a file."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        name, count = slug, 0
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return frozenset(found)


def broken(path: Path) -> list[str]:
    """Return the links of a file that lead nowhere."""
    wrong = []
    for target in links(path):
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif not file.is_relative_to(ROOT):
            wrong.append(f"{target}: outside of the repository")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            wrong.append(f"{target}: no such heading")
    return wrong


def links(path: Path) -> list[str]:
    text = IN_CODE.sub(
        lambda code: " " * len(code[0]), prose(path).replace("[`", "[ ").replace("`]", " ]")
    )
    return [link for link in LINK.findall(text) if "://" not in link and ":" not in link]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_file_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    count = sum(len(links(path)) for path in FILES)
    with capsys.disabled():
        print(f"\n{len(FILES)} Markdown files, {count} links between them")
    assert count > 200
