"""Where the package makes errors and warnings, and with which codes: its source is parsed.

`python -m tests.lab.error_sites` prints a line for each code, and the counts.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdp2._core.base.paragraphs import CODE, read_paragraphs

PACKAGE = Path(__file__).parents[2] / "fsdp2"
SHARED = {"wrong_type": "FS101", "wrong_value": "FS102", "translated": "FS103"}
"""Functions that make an error, and the code that all of their errors have."""


@dataclass(frozen=True)
class Site:
    """A call that makes an error or a coded message. ``code``: None if it lacks one."""

    place: str
    made_by: str
    code: str | None


@dataclass(frozen=True)
class Fault:
    """A call that lacks a code; ``remedy`` says what to write."""

    place: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.remedy}"


@cache
def parsed() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def error_classes() -> frozenset[str]:
    """Return the names of FSDPError and of every class below it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in parsed().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"FSDPError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Yield each call of the package: its place, itself, and the name of what it calls."""
    for file, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield f"fsdp2/{file}:{node.lineno}", node, name_of(node.func)


def own_codes() -> dict[str, str]:
    """Return the code of each error class that gives its own to ``super().__init__``."""
    found = {}
    for tree in parsed().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in error_classes():
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and name_of(call.func) == "__init__":
                        code = code_of(call)
                        if code is not None:
                            found[node.name] = code
    return found


def code_of(call: ast.Call) -> str | None:
    """Return the code that a call's first argument is, if it is one."""
    first = call.args[0] if call.args else None
    text = first.value if isinstance(first, ast.Constant) else None
    return text if isinstance(text, str) and CODE.fullmatch(text) else None


def hands_on(call: ast.Call) -> bool:
    """True for a first argument that is the code of another error: ``error.code``, ``code``."""
    return bool(call.args) and name_of(call.args[0]) == "code"


@cache
def sites() -> tuple[Site, ...]:
    """Return every call that makes an error, or the text of a warning, with a code of its own."""
    found, own = [], own_codes()
    makers = error_classes() | {"coded", "warn"}
    for place, call, name in calls():
        if name in SHARED:
            found.append(Site(place, name, SHARED[name]))
        elif name in own:
            found.append(Site(place, name, own[name]))
        elif name == "__init__" or hands_on(call):
            pass
        elif name in makers or code_of(call) is not None:
            found.append(Site(place, name, code_of(call)))
    return tuple(found)


def faults() -> list[Fault]:
    """Return the calls that lack a code."""
    found, own = [], own_codes()
    for place, call, name in calls():
        if ast.unparse(call.func) == "warnings.warn":
            if place.partition(":")[0] != "fsdp2/_core/base/warn.py":
                found.append(Fault(place, 'write warn("FSnnn", text), of _core/base/warn.py'))
        elif name not in error_classes() | {"coded", "warn"} or name in own:
            pass
        elif code_of(call) is None and not hands_on(call):
            remedy = (
                f'write {name}("FSnnn", text): the code of a paragraph of fsdp2/_core/errors that '
                "says what this error means, or, if none does, the next free code of its family, "
                "and a paragraph (CONTRIBUTING.md, Errors)"
            )
            found.append(Fault(place, remedy))
    return found


def raised() -> set[tuple[str, str]]:
    """Return (file, class) of all classes of others that the package raises itself."""
    return {
        (file, name_of(node.exc.func))
        for file, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if name_of(node.exc.func)[:1].isupper() and name_of(node.exc.func) not in error_classes()
    }


def main() -> None:
    count = Counter(site.code for site in sites())
    paragraphs = read_paragraphs()
    for paragraph in paragraphs:
        print(f"{paragraph.code} {count[paragraph.code]:4} {paragraph.title}")
    codes = {site.code for site in sites()} - {None}
    print(
        f"{len(sites())} messages, {len(codes)} codes, {len(paragraphs)} paragraphs, "
        f"{len(faults())} messages without a code"
    )


if __name__ == "__main__":
    main()
