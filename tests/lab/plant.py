"""Find the place that a fault names in the package, and change the source there.

A fault (`tests/lab/faults.txt`) names a function or class, and Python that stands inside it. Both
are looked up in syntax trees, so the fault still fits after its code was laid out anew or moved to
another file, and after a local name was changed. The rules of a pattern:

- It is an expression, or statements that follow each other in one block. It fits exactly once.
- A local name stands for any local name of the function, and everything else for itself.
- A statement `...` stands for any statements, at least one. `new` has those of `old`, in order.
- What `new` uses of the function's names stands in `old`, too.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.lab.faults import Fault

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NAMES = {  # where a syntax tree keeps names that a function may bind
    *((kind, "name") for kind in (*_DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)),
    *((ast.Name, "id"), (ast.arg, "arg"), (ast.alias, "asname"), (ast.Nonlocal, "names")),
}


@dataclass(frozen=True)
class Planted:
    """A file with a fault in it, and the lines whose place the fault took."""

    file: str
    source: str
    first: int
    last: int


@dataclass(frozen=True)
class Scope:
    """A function, class or module in which a pattern is looked for."""

    file: File
    node: Any
    local: frozenset[str]  # names that a pattern may call otherwise

    @property
    def place(self) -> str:
        return f"{self.file.name}:{getattr(self.node, 'lineno', 1)}"


@dataclass(frozen=True)
class Match:
    """Nodes that a pattern may fit, and what its names and each `...` stand for in them."""

    scope: Scope
    nodes: Sequence[Any]
    is_whole_block: bool
    names: dict[str, str] = field(default_factory=dict)
    left_out: list[list[ast.stmt]] = field(default_factory=list)

    @property
    def first(self) -> int:
        return min(n.lineno for n in (self.nodes[0], *getattr(self.nodes[0], "decorator_list", ())))

    @property
    def place(self) -> str:
        return f"{self.scope.file.name}:{self.first}: {' '.join(_text(self.nodes).split())[:160]}"


class File:
    """A module of the package, and the functions and classes that it has under each name."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.source = (root / name).read_bytes()
        self.tree = ast.parse(self.source)
        self.scopes = {"": [Scope(self, self.tree, frozenset())]}
        self._add(self.tree, "", frozenset())

    def _add(self, node: ast.AST, prefix: str, local: frozenset[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFINITIONS):
                inside, name = local, f"{prefix}{child.name}"
                if not local and not isinstance(child, ast.ClassDef):
                    inside = _bound(ast.iter_child_nodes(child))  # for functions inside it, too
                self.scopes.setdefault(name, []).append(Scope(self, child, inside))
                self._add(child, f"{name}.", inside)
            else:
                self._add(child, prefix, local)

    @cached_property
    def known_names(self) -> frozenset[str]:
        """What a function of the file can use without having bound it."""
        defined = {node.name for node in self.tree.body if isinstance(node, _DEFINITIONS)}
        others = (node for node in self.tree.body if not isinstance(node, _DEFINITIONS))
        return _bound(others).union(defined, dir(builtins))


class Package:
    """The package in a folder. It reads a file when a fault first needs it, and writes none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, File] = {}

    def file(self, name: str) -> File:
        if name not in self._files:
            self._files[name] = File(self._root, name)
        return self._files[name]

    def plant(self, fault: Fault) -> Planted:
        """Return the file that a fault changes, with the fault in it."""
        old, new = (list[Any](ast.parse(textwrap.dedent(s)).body) for s in (fault.old, fault.new))
        if all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (old, new)):
            old, new = [old[0].value], [new[0].value]
        match = self._match(fault, old)
        file, local = match.scope.file, match.scope.local
        used = {node.id for part in new for node in ast.walk(part) if isinstance(node, ast.Name)}
        unknown = used - (file.known_names - local) - set(match.names) - _bound(new)
        if unknown:
            raise SystemExit(f"{fault.name}: `old` says nothing of {', '.join(sorted(unknown))}")
        source = _spliced(file.source, match, _filled(new, match, iter(match.left_out)))
        return Planted(file.name, source, match.first, match.nodes[-1].end_lineno)

    def _match(self, fault: Fault, old: Sequence[Any]) -> Match:
        scopes = self._scopes(fault, old)
        found = [match for scope in scopes for match in _matches(old, scope)]
        if len(found) == 1:
            return found[0]
        said = f"{fault.name}: `old` fits {len(found)} times in {fault.where or 'its module'}"
        if not found:
            runs = (run for scope in scopes for run in _runs(old, scope))
            near = max(runs, key=lambda run: _likeness(_text(run.nodes), _text(old)), default=None)
            said, found = f"{said}; the nearest is", [near] if near else []
        raise SystemExit("\n  ".join([said, *(match.place for match in found)]))

    def _scopes(self, fault: Fault, old: Sequence[Any]) -> list[Scope]:
        """Return what the fault's file has under the name, or else the one other file that has."""
        if (self._root / fault.file).exists() and fault.where in self.file(fault.file).scopes:
            return self.file(fault.file).scopes[fault.where]
        paths = sorted((self._root / "fsdp2").rglob("*.py"))
        files = [self.file(path.relative_to(self._root).as_posix()) for path in paths]
        named = [file.scopes[fault.where] for file in files if fault.where in file.scopes]
        if len(named) > 1:
            fitting = [scopes for scopes in named if any(_matches(old, each) for each in scopes)]
            named = fitting or named
        if len(named) == 1:
            return named[0]
        said = f"{fault.name}: {fault.file} has no {fault.where!r}, and"
        if named:
            places = ", ".join(scopes[0].place for scopes in named)
            raise SystemExit(f"{said} more than one file has it: {places}")
        every = {name: scopes[0] for file in files for name, scopes in file.scopes.items()}
        near = max(every, key=lambda name: _likeness(name, fault.where))
        raise SystemExit(f"{said} no file has; the nearest is {near!r}, {every[near].place}")


def _runs(old: Sequence[Any], scope: Scope) -> Iterator[Match]:
    """Yield what a pattern may fit: each expression, or as many statements in a row as it has."""
    if isinstance(old[0], ast.expr):
        for node in _walk_outside_texts(scope.node):
            if isinstance(node, ast.expr):
                yield Match(scope, [node], is_whole_block=False)
        return
    parts = (value for node in ast.walk(scope.node) for _, value in ast.iter_fields(node))
    for block in ([scope.node], *parts):
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            for start in range(len(block) - len(old) + 1):
                run = block[start : start + len(old)]
                yield Match(scope, run, is_whole_block=len(run) == len(block))


def _matches(old: Sequence[Any], scope: Scope) -> list[Match]:
    exact = scope.file.known_names - _bound(old)
    return [run for run in _runs(old, scope) if _fits(old, run.nodes, run, exact)]


def _fits(old: Any, node: Any, match: Match, exact: frozenset[str], is_name: bool = False) -> bool:
    """Say whether a pattern fits a part of a tree; note in the match what its parts stand for."""
    if isinstance(old, list) and isinstance(node, list):
        for at, each in enumerate(old):
            if _is_rest(each):  # takes what the others leave
                end = len(node) - (len(old) - at - 1)
                node = [*node[:at], node[at:end], *node[max(at, end) :]]
        pairs = zip(old, node, strict=False)
        return len(old) == len(node) and all(_fits(*each, match, exact, is_name) for each in pairs)
    if _is_rest(old) and isinstance(node, list):
        match.left_out.append(node)
        return bool(node)
    if type(old) is not type(node):  # and True is not 1
        return False
    if isinstance(old, ast.AST):
        pairs = ((getattr(old, at, None), getattr(node, at, None)) for at in old._fields)
        named = ((type(old), at) in _NAMES for at in old._fields)
        return all(
            _fits(*pair, match, exact, is_n) for pair, is_n in zip(pairs, named, strict=True)
        )
    if not is_name or node not in match.scope.local:
        return bool(old == node)
    taken = {local: name for name, local in match.names.items()}
    is_free = match.names.setdefault(old, node) == node and taken.get(node, old) == old
    return is_free and (old == node or old not in exact)


def _filled(new: Any, match: Match, left_out: Iterator[Any], is_name: bool = False) -> Any:
    """Return a replacement with the names and the statements that were matched."""
    if isinstance(new, list):
        filled = (
            next(left_out) if _is_rest(each) else [_filled(each, match, left_out, is_name)]
            for each in new
        )
        return [node for nodes in filled for node in nodes]
    if isinstance(new, ast.AST):
        fields = {
            at: _filled(value, match, left_out, (type(new), at) in _NAMES)
            for at, value in ast.iter_fields(new)
        }
        return ast.copy_location(type(new)(**fields), new)
    return match.names.get(new, new) if is_name else new


def _spliced(source: bytes, match: Match, new: Sequence[Any]) -> str:
    """Return the source with new nodes in place of the match, and other lines where they were."""
    lines = source.splitlines(keepends=True)
    head, tail = match.nodes[0], match.nodes[-1]
    start = sum(map(len, lines[: match.first - 1])) + head.col_offset
    end = sum(map(len, lines[: tail.end_lineno - 1])) + tail.end_col_offset
    text = _text(new) or ("pass" if match.is_whole_block else "")
    spare = "\n" * (source[start:end].count(b"\n") - text.count("\n"))
    if isinstance(head, ast.expr):  # an operator beside it may bind closer than what is new
        text = f"({text}{spare})"
    else:
        if source[start:end].startswith(b"elif"):
            text = "else:\n" + textwrap.indent(text, "    ")
        text = textwrap.indent(text, " " * head.col_offset).lstrip(" ") + spare
    return (source[:start] + text.encode() + source[end:]).decode()


def _bound(nodes: Any) -> frozenset[str]:
    """Return the names that nodes bind, functions inside them too."""
    names: set[str] = set()
    declared: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Global):
            declared.update(node.names)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif not isinstance(node, ast.Nonlocal) and not isinstance(vars(node).get("ctx"), ast.Load):
            names.update(getattr(node, at) or "" for kind, at in _NAMES if type(node) is kind)
    return frozenset(names - declared)


def _walk_outside_texts(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree but not into f-strings, where nodes have no right place before Python 3.12."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk_outside_texts(child)


def _is_rest(node: Any) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and value.value is ...


def _text(nodes: Sequence[Any]) -> str:
    return "\n".join(map(ast.unparse, nodes))


def _likeness(text: str, wanted: str) -> float:
    return difflib.SequenceMatcher(None, text, wanted).ratio()
