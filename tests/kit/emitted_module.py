"""One emitted module, taken apart: functions, kernels, arguments.

Owns the reading of the module's text. It must not know what its statements do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.kit.emitted_kernels import Kernel, read_kernel

_LANGUAGES = {"cpp_pybinding": "cpp", "cpp": "cpp", "triton": "triton"}


class Module:
    """One emitted module: its functions, its kernels, and what ``get_args`` says of arguments."""

    def __init__(self, source: str) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.kernels: dict[str, Kernel] = {}
        self.aliases: dict[str, str] = {}
        for node in ast.parse(source).body:
            self._read(node)

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                self._read(inner)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if isinstance(value, ast.Attribute):
                self.aliases[name] = ast.unparse(value)
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                language = _LANGUAGES.get(value.func.attr)
                texts = [a.value for a in value.args if isinstance(a, ast.Constant)]
                texts = [text for text in texts if isinstance(text, str)]
                if language is not None and texts:
                    self.kernels[name] = read_kernel(name, texts[-1], language)

    @property
    def arguments(self) -> list[str]:
        """The names that ``call`` gives to its arguments."""
        return unpacked(self.functions["call"])

    def argument_tensors(self) -> dict[str, Tensor]:
        """Return tensors like those that ``get_args`` makes."""
        made: dict[str, Tensor] = {}
        for node in self.functions["get_args"].body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                call, target = node.value, ast.unparse(node.targets[0])
                if ast.unparse(call.func).endswith("as_strided"):
                    size, stride = (ast.literal_eval(argument) for argument in call.args[1:3])
                    made[target] = made[ast.unparse(call.args[0])].as_strided(size, stride)
                elif ast.unparse(call.func) == "rand_strided":
                    size, stride = (ast.literal_eval(argument) for argument in call.args[:2])
                    dtypes = [ast.unparse(k.value) for k in call.keywords if k.arg == "dtype"]
                    dtype = getattr(torch, dtypes[0].removeprefix("torch."))
                    made[target] = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return made


def unpacked(function: ast.FunctionDef) -> list[str]:
    """Return the names that ``... = args`` gives."""
    for statement in function.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == "args":
            (target,) = statement.targets
            names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            return [ast.unparse(name) for name in names]
    return []


def statements_of(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of ``with`` too."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from statements_of(statement.body)
        else:
            yield statement
