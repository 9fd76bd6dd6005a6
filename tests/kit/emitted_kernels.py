"""What a compiler's kernel stores: data that it moved, converted or computed, read from its source.

Owns the reading of one kernel's source. It must not know who calls the kernel, or with what.

A value in a kernel is an *index* (made of constants and loop counters; masks are, too), or *moved*
(a load, however it was chosen, transposed or broadcast), or *converted* (moved, in another dtype),
or *computed* (anything else that loads have a part in). A store is what its value is, so a kernel
that computes one output and copies another has one store of each. Of C++ the subset that inductor
writes is understood, with and without vectors, and of Triton what its pointwise kernels have;
anything that is not recognised counts as computed, and so does a load from a computed place.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

INDEX, MOVED, CONVERTED, COMPUTED = range(4)
KINDS = ("fill", "copy", "cast", "compute")
"""What a store is called, by what its value is: see above."""

_POINTER = re.compile(r"\b((?:in|out|in_out)_ptr\d+)\b")
_PARAMETER = re.compile(r"(?:const\s+)?([\w:]+)\s*\*\s*(?:__restrict__\s+)?(\w+)|[\w:]+\s+(\w+)")
_LOOP = re.compile(r"^for\s*\(\s*\w+\s+(\w+)\s*=(.*?);.*?<=?(.*?);", re.DOTALL)
_INTEGER = re.compile(r"^[\s()]*(?:static_cast\s*<[\w:]+>\s*\(\s*)?(\d+)L*\s*\)*\s*$")
_CONVERSION = re.compile(r"\bconvert\b|\bstatic_cast\b|\bto_float\b|\bc10::BFloat16\b")
_KEEPS = re.compile(
    r"convert|static_cast|VectorizedN|Vectorized|VecMask|loadu|cast|blendv|load|set|maskload|"
    r"masked_load|from"
)
_OPERATOR = re.compile(r"[-+*/%&|^!~]|<<|>>|[<>=]=?")


@dataclass(frozen=True)
class Value:
    """What an expression is, and the element types that it was loaded as."""

    level: int = INDEX
    dtypes: frozenset[str] = frozenset()

    def __or__(self, other: Value) -> Value:
        return Value(max(self.level, other.level), self.dtypes | other.dtypes)


@dataclass(frozen=True)
class Store:
    """One store: to which argument, of what kind, and how many elements; None: unknown."""

    argument: int
    kind: str
    numel: int | None


@dataclass(frozen=True)
class Kernel:
    """A kernel's stores; an argument is named by its position."""

    name: str
    stores: tuple[Store, ...]

    @property
    def written(self) -> frozenset[int]:
        return frozenset(store.argument for store in self.stores)


def read_kernel(name: str, source: str, language: str) -> Kernel:
    """Read a kernel's source; ``language`` is ``"cpp"`` or ``"triton"``."""
    found = _Triton(source).stores if language == "triton" else _Cpp(source).stores
    merged: dict[tuple[int, str, object], Store] = {}
    for place, store in found:
        merged.setdefault((store.argument, store.kind, place), store)  # a body, and its remainder
    return Kernel(name, tuple(merged.values()))


def kind_of(value: Value, dtype: str) -> str:
    """Name the store of a value to memory of a type."""
    level = value.level
    if level in (MOVED, CONVERTED):
        level = MOVED if value.dtypes <= {dtype} else CONVERTED  # there and back is no cast
    return KINDS[level]


@dataclass
class _Scope:
    """Braces: a loop (with its number and extent), a lambda (with the name it gets), or neither."""

    loop: int | None = None
    extent: int | None = 1
    assigned: str | None = None


@dataclass
class _Cpp:
    """One pass over the statements of a C++ kernel."""

    source: str
    stores: list[tuple[object, Store]] = field(default_factory=list)

    def __post_init__(self) -> None:
        head, brace, body = self._split()
        found = list(_PARAMETER.finditer(head))
        names = [match[2] or match[3] for match in found]
        self._position = {name: index for index, name in enumerate(names)}
        self._dtype = {match[2]: match[1] for match in found if match[2]}
        self._values: dict[str, Value] = {}
        self._scopes: list[_Scope] = []
        self._loops = 0
        for statement, ended_by in _statements(brace + body):
            self._step(" ".join(statement.split()), ended_by)

    def _split(self) -> tuple[str, str, str]:
        start = re.search(r"\bkernel\w*\s*\(", self.source) or re.search(
            r"\bvoid\s+\w+\s*\(", self.source
        )
        if start is None:
            return "", "", ""
        head, brace, body = self.source[start.end() :].partition("{")
        return head.rsplit(")", 1)[0], brace, body

    def _step(self, statement: str, ended_by: str) -> None:
        if ended_by == "{":
            self._open(statement)
            return
        if statement:
            self._run(statement)
        if ended_by == "}" and self._scopes:
            self._scopes.pop()

    def _open(self, statement: str) -> None:
        statement = re.sub(r"^(#pragma [\w ]+(\([^)]*\))? )+(?=for)", "", statement)
        if (loop := _LOOP.match(statement)) is not None:
            self._loops += 1
            start, end = (_INTEGER.match(text) for text in loop.group(2, 3))
            extent = None if start is None or end is None else int(end[1]) - int(start[1])
            self._scopes.append(_Scope(self._loops, extent))
        elif (assigned := re.match(r"auto (\w+) = \[", statement)) is not None:
            self._scopes.append(_Scope(assigned=assigned[1]))
        else:
            self._scopes.append(_Scope())

    def _run(self, statement: str) -> None:
        if (result := re.match(r"return (.*)$", statement)) is not None:
            names = [scope.assigned for scope in self._scopes if scope.assigned]
            if names:
                self._values[names[-1]] = self._value(result[1])
        elif "transpose_mxn" in statement:
            self._transpose(statement)
        elif (match := re.match(r"(\w+)\.store\((.*)\)$", statement)) is not None:
            self._store(match[2], self._value(match[1]))
        elif (match := re.match(r"atomic_add\w*(?:<.*?>)?\((.*)\)$", statement)) is not None:
            self._store(match[1], Value(COMPUTED))
        elif (match := re.match(r"([^=]*?)\s*[-+*/|&^]?=(?!=)\s*(.*)$", statement)) is not None:
            self._assign(statement, match[1], match[2])

    def _assign(self, statement: str, target: str, expression: str) -> None:
        value = self._value(expression)
        pointer = _POINTER.match(target)
        if re.search(r"[-+*/|&^]=", statement[: len(target) + 3]):
            value = Value(COMPUTED)
        if pointer is not None:
            self._store(target, value)
        elif (name := re.search(r"(\w+)(?:\[.*\])?$", target)) is not None:
            self._values[name[1]] = value

    def _transpose(self, statement: str) -> None:
        """A tile goes from an array to another one, of which one may be the kernel's argument."""
        inside = statement[statement.index("(") + 1 :]
        parts = _split_at(inside, ",")
        value = self._value(parts[0]) | self._address(parts[0])
        targets = [part for part in parts[1:] if _POINTER.search(part)]
        if targets:
            self._store(targets[0], value)
        elif (name := next((p for p in parts[1:] if re.match(r"\s*tmp\d+", p)), None)) is not None:
            self._values[name.strip().split("[")[0]] = value

    def _store(self, target: str, value: Value) -> None:
        pointer = _POINTER.search(target)
        if pointer is None:
            if (name := re.match(r"&?(\w+)", target.strip())) is not None:
                self._values[name[1]] = value
            return
        extents = [scope.extent for scope in self._scopes]
        numel = None if None in extents else math.prod(e for e in extents if e is not None)
        kind = kind_of(value, self._dtype.get(pointer[1], "?"))
        loop = tuple(scope.loop for scope in self._scopes if scope.loop is not None)
        # What is stored there by a body and by its remainder is at one place.
        self.stores.append((loop, Store(self._position.get(pointer[1], -1), kind, numel)))

    def _address(self, text: str) -> Value:
        pointer = _POINTER.search(text)
        return Value() if pointer is None else Value(MOVED, frozenset({self._dtype[pointer[1]]}))

    def _value(self, text: str) -> Value:
        """Say what an expression is."""
        found = Value()
        text = _without_templates(text)
        text, loads = _cut_loads(text)
        for pointer, address in loads:
            found |= Value(MOVED, frozenset({self._dtype.get(pointer, "?")}))
            if self._names(address).level >= MOVED:
                found |= Value(COMPUTED)  # a look-up in a table
        if (chosen := _choice(text)) is not None:
            return found | self._value(chosen[0]) | self._value(chosen[1])
        found |= self._names(text)
        if found.level >= MOVED:
            if _CONVERSION.search(text):
                found |= Value(CONVERTED)
            if self._computes(text):
                found |= Value(COMPUTED)
        return found

    def _names(self, text: str) -> Value:
        found = Value()
        for name in re.findall(r"\b[A-Za-z_]\w*\b", text):
            found |= self._values.get(name, Value())
        return found

    def _computes(self, text: str) -> bool:
        """True if anything happens to a value but a choice, a conversion or a broadcast."""
        text = re.sub(r"static_cast\(\d+L?\)|,\s*\d+L?\b", "", text)
        calls = re.findall(r"([A-Za-z_][\w:.]*)\s*\(", text)
        names = [call for call in calls if not re.fullmatch(r"tmp\d+(_\w+)?", call)]
        if any(not _KEEPS.fullmatch(re.sub(r"^.*[.:]", "", name)) for name in names):
            return True
        return bool(_OPERATOR.search(text))


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Yield statements, each with what ends it: a semicolon or a brace outside of parentheses."""
    depth, start = 0, 0
    text = re.sub(r"//[^\n]*|/\*.*?\*/|#(?:include|define)[^\n]*|#pragma GCC[^\n]*", "", text)
    for index, letter in enumerate(text):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif letter in ";{}" and depth <= 0:
            yield text[start:index].strip(), letter
            start = index + 1


def _without_templates(text: str) -> str:
    """Drop types and template arguments, which have no values in them."""
    text = re.sub(r"\bdecltype\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "T", text)
    pattern = re.compile(
        r"\b(convert|static_cast|VectorizedN|Vectorized|VecMask|cast|masked_load|loadu|blendv|"
        r"from|set|maskload)\s*<[^<>()]*(?:<[^<>]*>[^<>()]*)?>"
    )
    return pattern.sub(r"\1", text)


def _cut_loads(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Replace loads from arguments; return the rest, and each one's pointer and address."""
    loads: list[tuple[str, str]] = []
    while (match := _POINTER.search(text)) is not None:
        end = match.end()
        if text[end : end + 1] == "[":
            close = _closing(text, end)
            loads.append((match[1], text[end + 1 : close]))
            text = text[: match.start()] + "LOAD" + text[close + 1 :]
            continue
        opening = _opening(text, match.start())
        close = _closing(text, opening) if opening >= 0 else len(text)
        loads.append((match[1], text[end:close]))
        text = text[: opening + 1] + "LOAD" + text[close:]
    return text, loads


def _closing(text: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] in "([") - (text[index] in ")]")
        if depth == 0:
            return index
    return len(text)


def _opening(text: str, position: int) -> int:
    depth = 0
    for index in range(position - 1, -1, -1):
        depth += (text[index] in ")]") - (text[index] in "([")
        if depth < 0:
            return index
    return -1


def _choice(text: str) -> tuple[str, str] | None:
    """Return both values of ``condition ? one : other``."""
    question = text.find("?")
    if question < 0:
        return None
    parts = re.split(r"(?<!:):(?!:)", text[question + 1 :], maxsplit=1)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _split_at(text: str, separator: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == separator and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


@dataclass
class _Triton:
    """One pass over a Triton kernel, which is Python: its own parser reads it."""

    source: str
    stores: list[tuple[object, Store]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values: dict[str, Value] = {}
        functions = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef)]
        if not functions:
            return
        names = [argument.arg for argument in functions[-1].args.args]
        self._position = {name: index for index, name in enumerate(names)}
        for node in ast.walk(functions[-1]):
            if isinstance(node, ast.stmt):
                self._step(node)

    def _step(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self._values[node.targets[0].id] = self._value(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            name = ast.unparse(call.func)
            if name in ("tl.store", "tl.atomic_add"):
                value = self._value(call.args[1]) if name == "tl.store" else Value(COMPUTED)
                pointer = self._pointer(call.args[0])
                kind = KINDS[value.level]
                place = self._position.get(pointer, -1)
                self.stores.append((node.lineno, Store(place, kind, None)))

    def _pointer(self, node: ast.expr) -> str:
        names = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
        return next((name for name in names if _POINTER.fullmatch(name)), "")

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            return self._values.get(node.id, Value())
        if isinstance(node, ast.Call):
            return self._call(node)
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        found = _join(self._value, children)
        return found if found.level == INDEX else Value(COMPUTED)

    def _call(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        if name == "tl.load":
            is_computed = self._value(node.args[0]).level >= MOVED
            return Value(COMPUTED if is_computed else MOVED)
        if name == "tl.where":
            return _join(self._value, node.args[1:])
        if name in ("tl.broadcast_to", "tl.full"):
            return self._value(node.args[0])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            found = self._value(node.func.value)
            return found | Value(CONVERTED) if found.level == MOVED else found
        function = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        found = _join(self._value, [*function, *node.args])
        return found if found.level == INDEX else Value(COMPUTED)


def _join(value_of: Callable[[ast.expr], Value], nodes: list[ast.expr]) -> Value:
    found = Value()
    for node in nodes:
        found |= value_of(node)
    return found
