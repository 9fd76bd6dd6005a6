"""Find the private names of torch that a source uses, as dotted names.

A local name that stands for something of torch's is followed, in the order of the source. An
attribute of an object of which the source does not say whose it is, is a name that begins with a
dot.

A use is *guarded* if the code says itself that the name may be missing: it stands in a `try` that
catches that, under a condition that asks for it or for a version, or in a `getattr` with a default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MISSING = {"AttributeError", "ImportError", "ModuleNotFoundError", "Exception"}
"""What is raised where a name is not there."""


@dataclass(frozen=True, order=True)
class Use:
    """A name in a file; one that begins with a dot is an attribute of an object."""

    name: str
    file: str
    line: int
    is_guarded: bool


@dataclass
class _Finder(ast.NodeVisitor):
    """Collects the private names of one file."""

    package: str
    file: str
    own: set[str]
    meanings: dict[str, str] = field(default_factory=dict)  # dotted, of local names
    flags: set[str] = field(default_factory=set)  # local names that tell what is there
    uses: list[Use] = field(default_factory=list)
    guards: int = 0  # how many of them stand around

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top == self.package:
                self.meanings[alias.asname or top] = alias.name if alias.asname else top
                self._use(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == self.package:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self.meanings[alias.asname or alias.name] = name
                self._use(name, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if len(node.targets) == 1:
            self._remember(node.targets[0], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._remember(node.target, node.value)

    def _remember(self, target: ast.expr, value: ast.expr | None) -> None:
        """Note what a local name stands for, so that its attributes are known."""
        meaning, name = self._meaning(value), _dotted(target)
        if meaning and name:
            self.meanings[name] = meaning
        elif value is not None and name and self._asks_for_names(value):
            self.flags.add(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        meaning = self._meaning(node)
        if meaning:
            self._use(meaning, node)
            return
        if is_private(node.attr) and node.attr not in self.own and _dotted(node.value) != "self":
            self._use(f".{node.attr}", node)
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """See `vars(module)["_name"]`."""
        value, key = node.value, node.slice
        if isinstance(value, ast.Call) and _dotted(value.func) == "vars" and _is_text(key):
            for meaning in filter(None, map(self._meaning, value.args)):
                self._use(f"{meaning}.{_text(key)}", node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = _dotted(node.func)
        if called in ("attrgetter", "methodcaller"):
            for argument in filter(_is_text, node.args):
                self._attribute("", _text(argument), node)
        elif called in ("getattr", "hasattr", "setattr", "delattr") and _is_text(node.args[1]):
            with_default = called == "hasattr" or len(node.args) > 2
            self.guards += with_default
            self._attribute(self._meaning(node.args[0]), _text(node.args[1]), node)
            self.guards -= with_default
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "patch":
            owner = self._meaning(node.func.value)
            for keyword in node.keywords if owner else ():  # settings of a module
                self._use(f"{owner}.{keyword.arg}", node)
        self.generic_visit(node)

    def _attribute(self, owner: str, name: str, node: ast.AST) -> None:
        if owner:
            self._use(f"{owner}.{name}", node)
        elif is_private(name) and name not in self.own:
            self._use(f".{name}", node)

    def visit_Try(self, node: ast.Try) -> None:
        caught = {
            (_dotted(name) or "").rpartition(".")[2]
            for handler in node.handlers
            for name in (
                handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            )
            if name is not None
        }
        self._under(any(not h.type for h in node.handlers) or bool(caught & MISSING), node.body)
        self._under(False, [*node.handlers, *node.orelse, *node.finalbody])

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        branches = [*_listed(node.body), *_listed(node.orelse)]
        self._under(self._asks_for_names(node.test), branches)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def _under(self, is_guard: bool, nodes: Iterable[ast.AST]) -> None:
        self.guards += is_guard
        for node in nodes:
            self.visit(node)
        self.guards -= is_guard

    def _asks_for_names(self, test: ast.expr) -> bool:
        """True for a condition that asks whether a name is there, or for a version."""
        asked = {part for node in ast.walk(test) for part in _dotted(node).split(".")}
        return not asked.isdisjoint({"hasattr", *self.flags}) or any(
            "version" in name.lower() for name in asked
        )

    def _meaning(self, node: ast.AST | None) -> str:
        """Return what an expression names in torch, or an empty text."""
        dotted = _dotted(node)
        for known in sorted(self.meanings, key=len, reverse=True):
            if dotted == known or dotted.startswith(f"{known}."):
                return self.meanings[known] + dotted[len(known) :]
        return ""

    def _use(self, name: str, node: ast.AST) -> None:
        if any(is_private(part) for part in name.split(".")):
            line: int = node.lineno  # type: ignore[attr-defined]  # statements and expressions
            self.uses.append(Use(name, self.file, line, self.guards > 0))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _dotted(node: ast.AST | None) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _listed(part: ast.AST | Sequence[ast.AST]) -> Sequence[ast.AST]:
    return [part] if isinstance(part, ast.AST) else part


def _own_names(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and _dotted(node).startswith("self."):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def uses_in(source: str, file: str, package: str = "torch") -> list[Use]:
    """Return the private names of a package that a source uses, in the order of the source."""
    tree = ast.parse(source)
    finder = _Finder(package, file, _own_names(tree))
    finder.visit(tree)
    return finder.uses


def uses_of_the_package() -> list[Use]:
    files = sorted((ROOT / "fsdp2" / "_core" / "base").glob("torch_*.py"))
    return [use for path in files for use in uses_in(path.read_text(), path.name)]
