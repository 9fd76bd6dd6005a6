"""Which lines of the package only a device executes, and whether a scenario does: `--coverage`.

Two views. What *ran*: a trace hook notes the lines of the package in each world of each scenario;
some ran in the simulated one alone. What *could* run: branches that a CPU cannot take, read from
the source (`device_only`). A statement in such a branch that no scenario ran is listed with its
text. Decisions within a line (``a if x.is_cpu else b``) are counted as one statement.
"""

from __future__ import annotations

import ast
import dataclasses
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fsdp2
from tests.sim._world import SCENARIOS, Values, World, run_scenario

PACKAGE = Path(fsdp2.__file__).parent
Line = tuple[str, int]

# What names and attributes are on a CPU. What is not here is not known.
ON_A_CPU = {
    "is_cpu": True,
    "is_host": True,
    "async_op": True,
    "as_it_is": True,  # of packing: the buffer is the host's
    "has_lanes": False,
    "pins": False,
    "is_away": False,
    "is_pinned": False,
    "is_released": False,  # of gradients, where it is asked of a buffer
    "_waits_for_copy": False,
    "through_host": False,
    "coalesces": False,
}
ABSENT_ON_A_CPU = ("host_read",)  # None there
PRESENT_ON_A_CPU = ("_views",)
CLASSES = {  # whose methods a CPU never enters
    "_core/agreement/agreement.py": ("Follower",),
    "_core/comm/late_look.py": ("LateLook",),
    "_core/comm/device_streams.py": ("DeviceStreams",),
    "_core/comm/symmetric.py": ("SymmetricMemoryAllGather",),
}
UNKNOWN_HERE = {  # the same name means something else in these files: what a caller asks for
    "_core/api/module.py": ("async_op",),
    "_core/comm/wire.py": ("async_op",),
}


class Traced:
    """A context that notes the package's lines that run inside it, in every thread of torch's."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self._root = f"{PACKAGE}/"

    def __enter__(self) -> Traced:
        threading.settrace(self._enter_frame)
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as documented

    def follow_backward(self, device: torch.device, on: bool) -> None:
        """Trace the thread in which autograd runs a device's backward: it is none of Python's."""
        hook = self._enter_frame if on else None

        class Switch(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                sys.settrace(hook)
                return grad

        Switch.apply(torch.ones(1, device=device, requires_grad=True)).sum().backward()

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._note if frame.f_code.co_filename.startswith(self._root) else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            name = frame.f_code.co_filename[len(self._root) :]
            self.lines.add((name, frame.f_lineno))
        return self._note


def trace_scenario(name: str, folder: str, rank: int) -> None:
    """Run a scenario on this rank; leave the lines that ran in each world."""
    program, seen = SCENARIOS[name].program, dict[str, set[Line]]()

    def traced(world: World) -> Values:
        with Traced() as trace:
            if world.is_simulated:
                trace.follow_backward(world.device, on=True)
            try:
                return program(world)
            finally:
                if world.is_simulated:
                    trace.follow_backward(world.device, on=False)
                seen[world.kind] = trace.lines

    SCENARIOS[name] = dataclasses.replace(SCENARIOS[name], program=traced)
    try:
        run_scenario(name)
    finally:
        SCENARIOS[name] = dataclasses.replace(SCENARIOS[name], program=program)
        (Path(folder) / f"{rank}").write_bytes(pickle.dumps(seen))


trace_scenario.body = trace_scenario  # type: ignore[attr-defined]  # what a rank looks for


# What could run.


@dataclass(frozen=True)
class Statement:
    """A statement that a CPU does not reach, by its first and last line, without its body."""

    file: str
    first: int
    last: int
    text: str

    def ran(self, lines: set[Line]) -> bool:
        return any((self.file, line) in lines for line in range(self.first, self.last + 1))


def device_only(package: Path = PACKAGE) -> list[Statement]:
    """Return the statements of a package that a CPU cannot reach, as far as branches tell."""
    found = []
    for path in sorted(package.rglob("*.py")):
        found += _Reader(path.relative_to(package).as_posix(), path.read_text()).read()
    return found


@dataclass
class _Reader:
    file: str
    source: str
    found: list[Statement] = field(default_factory=list)

    def read(self) -> list[Statement]:
        self._lines = self.source.splitlines()
        tree = ast.parse(self.source)
        self._block(tree.body, False)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.IfExp)
                and self._value(node.test) is not None
                and not any(each.first <= node.lineno <= each.last for each in self.found)
            ):
                self._add(node)
        return self.found

    def _block(self, body: Sequence[ast.stmt], is_device: bool) -> None:
        for statement in body:
            self._statement(statement, is_device)
            if isinstance(statement, ast.If) and not is_device:
                # Whoever left before this is on a CPU: what follows is the device's.
                value = self._value(statement.test)
                is_device = value is True and _leaves(statement.body)

    def _statement(self, statement: ast.stmt, is_device: bool) -> None:
        is_name = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_device and not is_name and not _is_text(statement):
            self._add(statement)
        if isinstance(statement, ast.ClassDef):
            is_own = statement.name in CLASSES.get(self.file, ())
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    self._block(inner.body, is_own or is_device)
                else:
                    self._statement(inner, is_device)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            self._block(statement.body, is_device)
        elif isinstance(statement, ast.If):
            value = self._value(statement.test)
            self._block(statement.body, is_device or value is False)
            self._block(statement.orelse, is_device or value is True)
        else:
            for name in ("body", "orelse", "finalbody"):
                self._block(getattr(statement, name, []), is_device)
            for handler in getattr(statement, "handlers", []):
                self._block(handler.body, is_device)

    def _add(self, statement: ast.stmt | ast.IfExp) -> None:
        body, last = getattr(statement, "body", None), statement.end_lineno or statement.lineno
        if isinstance(body, list):
            last = body[0].lineno - 1
        text = " ".join(line.strip() for line in self._lines[statement.lineno - 1 : last])
        last = max(last, statement.lineno)
        self.found.append(Statement(self.file, statement.lineno, last, text))

    def _value(self, test: ast.expr) -> bool | None:
        """Return what a condition is on a CPU; None if that depends on something else."""
        if isinstance(test, ast.BoolOp):
            values = [self._value(part) for part in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self._value(test.operand)
            return None if value is None else not value
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test)
        return self._known(_name(test))

    def _known(self, name: str) -> bool | None:
        return None if name in UNKNOWN_HERE.get(self.file, ()) else ON_A_CPU.get(name)

    def _compared(self, test: ast.Compare) -> bool | None:
        left, op, right = _name(test.left), test.ops[0], test.comparators[0]
        value = right.value if isinstance(right, ast.Constant) else ...
        equal = isinstance(op, ast.Eq | ast.Is)
        if left in ("type", "device_type") and value == "cpu":
            return equal
        if value is None and left in ABSENT_ON_A_CPU:
            return equal
        if value is None and left in PRESENT_ON_A_CPU:
            return not equal
        return None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# What is printed.


@dataclass
class Coverage:
    """Lines that ran, by world, in all scenarios."""

    ran: Mapping[str, set[Line]]

    @property
    def simulated_only(self) -> set[Line]:
        return self.ran["sim"] - self.ran["cpu"]

    def missing(self) -> list[Statement]:
        return [each for each in device_only() if not each.ran(self.ran["sim"])]

    def table(self) -> Iterator[str]:
        """Yield a row for each file that does something on a device only."""
        statements = device_only()
        only = self.simulated_only
        files = sorted({each.file for each in statements} | {file for file, _ in only})
        yield f"{'file':<36} {'device only':>11} {'run':>5} {'lines in sim alone':>18}"
        total = [0, 0, 0]
        for file in files:
            own = [each for each in statements if each.file == file]
            row = [
                len(own),
                sum(each.ran(self.ran["sim"]) for each in own),
                sum(name == file for name, _ in only),
            ]
            total = [a + b for a, b in zip(total, row, strict=True)]
            yield f"{file:<36} {row[0]:>11} {row[1]:>5} {row[2]:>18}"
        yield f"{'':<36} {total[0]:>11} {total[1]:>5} {total[2]:>18}"

    def listing(self) -> Iterator[str]:
        """Yield the lines that ran in the simulated world alone, and what no scenario ran."""
        yield "ran on the simulated device alone:"
        texts: dict[str, list[str]] = {}
        for file, line in sorted(self.simulated_only):
            if file not in texts:
                texts[file] = (PACKAGE / file).read_text().splitlines()
            yield f"  {file}:{line:<5} {texts[file][line - 1].strip()}"
        yield "for a device alone, and run by no scenario:"
        for each in self.missing():
            yield f"  {each.file}:{each.first:<5} {each.text}"


def measure(
    names: Sequence[str], trace: Callable[[str], tuple[list[Mapping[str, set[Line]]], str]]
) -> Coverage:
    """Run scenarios by ``trace``, which returns each rank's lines and what went wrong."""
    ran: dict[str, set[Line]] = {"cpu": set(), "sim": set()}
    for name in names:
        found, wrong = trace(name)
        for seen in found:
            for kind, lines in seen.items():
                ran[kind] |= lines
        if wrong:
            print(f"{name}: did not pass\n{wrong}", file=sys.stderr)
    return Coverage(ran)
