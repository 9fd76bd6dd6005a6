"""The layer table of `docs/architecture.md` stays true: read from the source, nothing is imported.

Three rules: a module imports only from lower layers; every file is in the table; private torch
names appear in `_torch.py` alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdp2"
TABLE = ROOT / "docs" / "architecture.md"
FILES = sorted(path.name for path in PACKAGE.glob("*.py"))

# Where `module._parameters[name] = ...` is what registering means, and a type's own field names.
AGREED = {"_parameters", "_buffers", "_fields"}


@cache
def layers() -> dict[str, int]:
    """Read the rows `| L | `file` | owns |`."""
    rows = re.findall(r"^\| *(\d+) *\| *`(\w+\.py)`", TABLE.read_text(), re.MULTILINE)
    return {name: int(layer) for layer, name in rows}


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk everything that runs, functions included: not what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from runtime_nodes(node)


def imported_files(name: str) -> set[str]:
    """Return the files of this package that a file imports."""
    modules = set()
    for node in runtime_nodes(parse(name)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    parts = [module.split(".") for module in modules]
    return {f"{p[1]}.py" for p in parts if p[0] == "fsdp2" and len(p) > 1} & set(FILES)


def torch_imports(name: str) -> Iterator[str]:
    """Yield the dotted names that a file imports from torch."""
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_private_names() -> set[str]:
    """Collect every private name that the package defines: what is left is somebody else's."""
    names: set[str] = {Path(name).stem for name in FILES}
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def foreign_private_names(name: str) -> set[str]:
    """Return the private attributes a file uses that no file of the package defines."""
    used = set()
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            used.add(str(node.args[1].value))
    return {attr for attr in used if is_private(attr)} - own_private_names() - AGREED


def test_every_file_is_in_the_table_and_the_other_way_round() -> None:
    assert len(FILES) > 20
    assert sorted(layers()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_imports_come_from_lower_layers_only(name: str) -> None:
    table = layers()
    upward = [other for other in imported_files(name) if table[other] >= table[name]]
    assert not upward, f"{name} (layer {table[name]}) imports {upward}"


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_torchs_own_fsdp(name: str) -> None:
    """Nothing but the public names that other software asks about, in one file."""
    found = {n for n in torch_imports(name) if re.match(r"torch\.distributed\.(_?fsdp|.*fsdp)", n)}
    allowed = (
        "FSDPModule",
        "ShardingStrategy",
        "UnshardHandle",
        "fully_shard",
        "wrap.CustomPolicy",
    )
    names = allowed if name == "_torch.py" else ()
    assert found == {f"torch.distributed.fsdp.{n}" for n in names}


@pytest.mark.parametrize("name", [name for name in FILES if name != "_torch.py"])
def test_private_torch_names_stay_in_one_file(name: str) -> None:
    private = [n for n in torch_imports(name) if any(is_private(part) for part in n.split("."))]
    assert not private
    assert not foreign_private_names(name)


FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"}


def _ambient_calls(name: str) -> list[str]:
    """Calls of torch's factories without a device, or of `tensor` and `full` without a dtype."""
    found = []
    for node in ast.walk(parse(name)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made, owner = node.func.attr, node.func.value
        if made in FACTORIES and isinstance(owner, ast.Name) and owner.id == "torch":
            given = {keyword.arg for keyword in node.keywords}
            if "device" not in given or (
                made in ("empty", "zeros", "full") and "dtype" not in given
            ):
                found.append(f"line {node.lineno}: torch.{made}")
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_tensor_of_ours_depends_on_ambient_modes(name: str) -> None:
    """`with torch.device(...)` and the default dtype are for the user's tensors."""
    assert not _ambient_calls(name)


def test_the_rules_see_what_they_look_for() -> None:
    """The one file that may use private names shows that they are found."""
    assert {"_dtensor_spec", "_StridedShard"} <= {
        part for name in torch_imports("_torch.py") for part in name.split(".")
    }
    assert {"_local_tensor", "_base", "_execution_engine"} <= foreign_private_names("_torch.py")
    assert {"_layout.py", "_torch.py"} <= imported_files("_packing.py")
    assert "_hooks.py" not in imported_files("_runtime.py")  # under TYPE_CHECKING
    assert "_hooks" in (PACKAGE / "_runtime.py").read_text()
