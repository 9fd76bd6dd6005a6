"""Every public name has a place in the reference, with an example that runs; the glossary is short.

Public is what `tests/test_public.py` pins: the lists `__all__`, and the methods of `FSDPModule`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fsdp2
from fsdp2._core.api.module import FSDPModule
from fsdp2._core.api.settings import ControlSurface
from tests.docs._blocks import DOCS, read_blocks

REFERENCE = DOCS / "reference"
PLACE = re.compile(r"^\.\. auto(?:function|class|method|exception|data):: ([\w.]+)$", re.MULTILINE)
MOST_WORDS = 20


def public_names() -> list[str]:
    found = [f"fsdp2.{name}" for name in fsdp2.__all__]
    for module in (getattr(fsdp2, name) for name in fsdp2._SUBMODULES):
        found += [f"{module.__name__}.{name}" for name in module.__all__]
    for cls in (FSDPModule, ControlSurface):
        found += [
            f"fsdp2.FSDPModule.{name}"
            for name, value in vars(cls).items()
            if callable(value) and not name.startswith("_")
        ]
    return found


def places() -> dict[str, Path]:
    """Return the page of each name that the reference describes."""
    found: dict[str, Path] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in PLACE.findall(page.read_text()):
            assert name not in found, f"{name} is in {found[name].name} and in {page.name}"
            found[name] = page
    return found


def test_every_public_name_has_one_place() -> None:
    assert sorted(places()) == sorted(public_names())


@pytest.mark.parametrize("name", public_names())
def test_every_name_has_an_example_that_runs(name: str) -> None:
    page = places().get(name)
    assert page is not None, f"{name} has no place in docs/reference"
    word = name.rpartition(".")[2]
    assert any(
        re.search(rf"\b{word}\b", block.text) for block in read_blocks(page) if block.runs
    ), f"no block of {page.name} uses {name}"


def test_the_index_leads_to_every_name() -> None:
    index = (REFERENCE / "index.md").read_text()
    linked = set(re.findall(r"\[`([\w.]+)`\]\(\w+\.md#[\w-]+\)", index))
    methods = {name for name in public_names() if name.startswith("fsdp2.FSDPModule.")}
    wanted = {name.removeprefix("fsdp2.") for name in set(public_names()) - methods}
    assert linked == wanted


def glossary() -> list[str]:
    """Return the terms with a section each: those before the table of other terms."""
    sections, _, _ = (DOCS / "glossary.md").read_text().partition("\n## Other terms\n")
    return re.findall(r"^## (.+)$", sections, re.MULTILINE)


def test_the_glossary_is_short_and_says_each_word_once() -> None:
    words = glossary()
    assert len(words) == len(set(words)) <= MOST_WORDS


IGNORED = (
    re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL),  # blocks
    re.compile(r"^#+ .*$", re.MULTILINE),
    re.compile(r"<!--.*?-->"),
    re.compile(r"`[^`\n]*`"),
)
LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")


def unlinked(text: str) -> list[str]:
    """Return the words of the glossary whose first use in a text does not lead there."""
    for kind in IGNORED:
        text = kind.sub(" ", text)
    plain = LINK.sub(lambda link: "_" * len(link[0]), text)
    found = []
    for word in glossary():
        slug, pattern = word.lower().replace(" ", "-"), word.replace(" ", r"\s+")
        linked = re.search(rf"\]\([\w./]*glossary\.md#{slug}\)", text)
        used = re.search(rf"\b{pattern}(?:s|es)?\b", plain, re.IGNORECASE)
        if used and (linked is None or linked.start() > used.start()):
            found.append(f"{word}: {text[max(0, used.start() - 30) : used.end() + 20]!r}")
    return found


def test_the_tutorial_links_words_where_they_come_first() -> None:
    pages = [DOCS / "tutorial" / "index.md", *sorted((DOCS / "tutorial").glob("step*.md"))]
    assert unlinked("\n".join(page.read_text() for page in pages)) == []


@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=lambda p: p.stem)
def test_a_guide_links_words_where_they_come_first(page: Path) -> None:
    assert unlinked(page.read_text()) == []
