"""Patterns of prose that a reader of the field must translate back: `python -m tests.lab.prose`.

`scripts/lint` runs it over the documents, docstrings, comments and messages of the package, the
examples and the manual. It finds the most frequent idioms, and does not judge style. Each pattern
has a reason and a cure. `prose: NAME` in a comment on the same line is an exception.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "fsdp2")


@dataclass(frozen=True)
class Pattern:
    """An idiom to avoid. ``only_first``: looked for in the first line of a docstring alone."""

    name: str
    regex: str
    reason: str
    cure: str
    only_first: bool = False


_THINGS = (
    "buffer|clock|document|file|group|hook|list|mark|message|module|name|node|note|object|page|plan|"
    "program|record|recording|row|section|sentence|stamp|table|tensor|unit"
)

PATTERNS = (
    Pattern(
        "who",
        r"(?:^|[.;:] )Who (?!am\b|are you)[a-z]+ (?![^.]*\?)|\b[Ww]hoever\b",
        "a relative clause as a subject hides who acts",
        "name the actor: the caller, the user, the rank that ...",
    ),
    Pattern(
        "what-is-not",
        r"^(?!#).*\b[Ww]hat (?:is|are|was|were|has|does|do|can) ?not\b(?![^.]*\?)",
        "a relative clause as a subject hides what the sentence is about",
        "name the thing: tensors that are not ..., other options",
    ),
    Pattern(
        "of-ours",
        r"\bof (?:ours|theirs|the user's|a user's|users')(?= |[.,;:)]|$)|\bof others(?=[.,;:)]|$)",
        "a possessive after the noun is rare in technical English",
        "our ..., the user's ..., another rank's ...",
    ),
    Pattern(
        "nobody",
        r"\b(?:[Nn]obody|[Ee]verybody)\b",
        "people stand for code or ranks",
        "no caller, no rank, unused, all users",
    ),
    Pattern(
        "knows",
        r"\b(?:must|need|may) not know\b|\b(?:It|They) knows?\b|\bknows nothing\b",
        "a module is not a person",
        "independent of ..., contains no ... code",
    ),
    Pattern(
        "acts",
        rf"\b(?:{_THINGS})s? (?:tells?|told|learns?|learnt|believes?|forgets?|forgot|thinks?)\b",
        "a thing that acts as a person",
        "contains, records, reports, raises, detects",
    ),
    Pattern(
        "archaic",
        r"\b(?:anew|for ever|thereof|for so long)\b",
        "foreign or dated",
        "again, indefinitely, of it, while",
    ),
    Pattern(
        "opening",
        r"^(?:What|Who|Whose|Which|Where|How) [a-z](?!.*\?)",
        "a docstring names a thing or an action",
        "Return ..., a noun, or an imperative",
        only_first=True,
    ),
)


@dataclass(frozen=True)
class Line:
    """A line of prose, without the names of code in it."""

    number: int
    text: str
    is_first: bool = False


def _named(text: str) -> str:
    return re.sub(r"`+[^`]*`+", "X", text)


def lines_of_document(text: str) -> Iterator[Line]:
    """Yield the lines of Markdown outside of code blocks."""
    is_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Line(number, _named(line))


def lines_of_source(text: str) -> Iterator[Line]:
    """Yield the lines of docstrings, of other strings with a space in them, and of comments."""
    tree = ast.parse(text)
    firsts = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                is_first = offset == 0 and id(node) in firsts
                yield Line(node.lineno + offset, _named(line.strip()), is_first)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Line(token.start[0], _named(token.string.lstrip("# ")))


def found_in(path: Path) -> list[tuple[int, Pattern]]:
    """Return the line and the pattern of each idiom in a file, without named exceptions."""
    text = path.read_text(encoding="utf-8")
    source = text.split("\n")
    lines = lines_of_source(text) if path.suffix == ".py" else lines_of_document(text)
    return [
        (line.number, pattern)
        for line in lines
        for pattern in PATTERNS
        if line.is_first or not pattern.only_first
        if re.search(pattern.regex, line.text)
        if f"prose: {pattern.name}" not in source[line.number - 1]
    ]


def main(arguments: Sequence[str]) -> int:
    """Print what was found in the files and folders, or in all that are read; 1 if anything was."""
    status = 0
    for start in (ROOT / name for name in arguments or READ):
        paths = [start] if start.is_file() else sorted(start.rglob("*"))
        for path in (path for path in paths if path.suffix in (".py", ".md")):
            for number, pattern in found_in(path):
                where = f"{path.relative_to(ROOT)}:{number}"
                print(f"{where}: {pattern.name}: {pattern.reason}. Write: {pattern.cure}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
