"""The layers of `docs/architecture.md` are those of the source: it is parsed, nothing is imported.

A folder imports only from folders on lower layers, and no file is in a circle, whether the import
runs or only a type checker reads it; private torch names appear in `_core/base/torch_*.py` alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdp2"
TABLE = ROOT / "docs" / "architecture.md"
FILES = sorted(
    str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.stat().st_size
)
OF_TORCH = {name for name in FILES if name.startswith("_core/base/torch_")}

# Where `module._parameters[name] = ...` is what registering means, and a type's own field names.
AGREED = {"_parameters", "_buffers", "_fields"}


@cache
def layers() -> dict[str, int]:
    """Read the rows `| layer | `folder/`, `file.py` | what is there |`."""
    found = {}
    for layer, names in re.findall(
        r"^\| *(\d+) *\| *(`[^|]*`) *\|", TABLE.read_text(), re.MULTILINE
    ):
        found |= {name.rstrip("/"): int(layer) for name in re.findall(r"`([^`]+)`", names)}
    return found


def place_of(name: str) -> str:
    """Return what has a layer: a wing, a room of a wing, or a file beside them."""
    return next(p for p in (name, *map(str, PurePosixPath(name).parents)) if p in layers())


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


@cache
def imported_files(name: str) -> set[str]:
    """Return the files of this package that a file imports, also for a type checker alone."""
    modules: set[str] = set()
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    paths = {module.removeprefix("fsdp2.").replace(".", "/") for module in modules}
    files = {f"{path}.py" for path in paths} | {f"{path}/__init__.py" for path in paths}
    return (files & set(FILES)) - {name}


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
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("attrgetter", "methodcaller")
        ):
            used |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return {attr for attr in used if is_private(attr)} - own_private_names() - AGREED


def test_everything_has_one_of_eight_floors() -> None:
    assert {place_of(name) for name in FILES} == set(layers())
    assert set(layers().values()) == set(range(1, 9))


@pytest.mark.parametrize("name", FILES)
def test_imports_come_from_lower_floors_only(name: str) -> None:
    place = place_of(name)
    others = {other for other in imported_files(name) if place_of(other) != place}
    upward = {other for other in others if layers()[place_of(other)] >= layers()[place]}
    beside = {
        "__init__.py": {  # what it makes public
            "debug.py",
            "plans.py",
            "recordings.py",
            "weights",
            "_tools/plan",
            "_tools/record",
        },
        "debug.py": {"_tools/record"},
        "plans.py": {"_tools/plan"},
        "recordings.py": {"_tools/record"},
        "weights/_route.py": {"_tools/plan"},  # the links of machines
        "weights/_update.py": {"_tools/plan"},
        "__main__.py": {"_tools/commands.py"},  # what it starts
        "_tools/commands.py": {"_tools/doctor", "_tools/plan"},
    }.get(name, set())
    assert {place_of(other) for other in upward} <= beside, (
        f"{name} (layer {layers()[place]}) imports {upward}"
    )


def test_no_file_is_in_a_circle() -> None:
    TopologicalSorter({name: imported_files(name) for name in FILES}).prepare()


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_torchs_own_fsdp(name: str) -> None:
    """Nothing but the names that other software asks about, in one file."""
    found = {n for n in torch_imports(name) if re.match(r"torch\.distributed\.(_?fsdp|.*fsdp)", n)}
    allowed = (
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "ShardingStrategy",
        "_fully_shard._fsdp_common.DDPMeshInfo",
        "_fully_shard._fsdp_common.FSDPMeshInfo",
        "_fully_shard._fsdp_common.HSDPMeshInfo",
        "_fully_shard._fsdp_state.FSDPState",
        "GradientReductionHandle",
        "UnshardHandle",
        "fully_shard",
        "wrap.CustomPolicy",
        "wrap.ModuleWrapPolicy",
        "wrap.transformer_auto_wrap_policy",
    )
    names = allowed if name == "_core/base/torch_modules.py" else ()
    whole = {"torch.distributed.fsdp"} if names else set()
    assert found == {f"torch.distributed.fsdp.{n}" for n in names} | whole


@pytest.mark.parametrize("name", [name for name in FILES if name not in OF_TORCH])
def test_private_torch_names_stay_in_their_files(name: str) -> None:
    private = [n for n in torch_imports(name) if any(is_private(part) for part in n.split("."))]
    assert not private
    assert not foreign_private_names(name)


ENGINE = ("_core/engine/", "_core/params/", "_core/comm/")
PATCHES = {"setattr", "delattr", "put"}


def _methods_of_the_engine() -> dict[str, set[str]]:
    """Return the files that define a method of each name, of classes of the engine."""
    found: dict[str, set[str]] = {}
    for name in (name for name in FILES if name.startswith(ENGINE)):
        for node in ast.walk(parse(name)):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
                        found.setdefault(method.name, set()).add(name)
    return found


def _methods_by_string(name: str) -> list[str]:
    """Return methods of the engine that a file patches by a string, and private ones it names."""
    methods, found = _methods_of_the_engine(), []
    for node in ast.walk(parse(name)):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found += [t for t in texts if called in PATCHES and name not in methods.get(t, {name})]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            private = node.value.startswith("_")
            if private and name not in methods.get(node.value, {name}):
                found.append(node.value)
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_method_of_the_engine_is_named_by_a_string(name: str) -> None:
    """Whoever renames a method finds all that call it; observers know kinds, not methods."""
    assert not _methods_by_string(name)


def test_no_object_of_the_engine_is_cloned_by_its_variables() -> None:
    """`vars(self).update(vars(other))` would take over whatever the other class has next year."""
    for name in FILES:
        for node in ast.walk(parse(name)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
                given = [getattr(getattr(a, "func", None), "id", "") for a in node.args]
                assert "vars" not in given, name


def test_every_note_that_is_named_exists() -> None:
    """Where `[Note: x] in ``file``` says, or else anywhere; a heading stands alone on its line."""
    texts = {name: (PACKAGE / name).read_text() for name in FILES}
    homes: dict[str, list[str]] = {}
    for name, text in texts.items():
        for note in re.findall(r"^ *(?:# )?\[Note: ([^\]]+)\]$", text, re.MULTILINE):
            homes.setdefault(note, []).append(name.removesuffix(".py"))
    wrong = []
    for name, text in texts.items():
        flat = re.sub(r"\s*\n\s*(#\s*)?", " ", text)
        for note, place in re.findall(r"\[Note: ([^\]]+)\](?: in ``([\w./]+)``)?", flat):
            at = homes.get(note, []) if not note.endswith("...") else [name]
            path = place.removeprefix("fsdp2").replace(".", "/").strip("/")
            if not at or (path and not any(f"/{one}".endswith(f"/{path}") for one in at)):
                wrong.append(f"{name}: [Note: {note}] in {place or 'any file'}")
    assert not wrong


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
    """The files that may use private names show that they are found."""
    imported = {part for n in OF_TORCH for name in torch_imports(n) for part in name.split(".")}
    assert {"_dtensor_spec", "_StridedShard"} <= imported
    used = {name for n in OF_TORCH for name in foreign_private_names(n)}
    assert {"_local_tensor", "_base", "_execution_engine"} <= used
    packed = imported_files("_core/params/gradient_packing.py")
    assert {"_core/params/layout.py", "_core/base/torch_tensors.py"} <= packed
    assert "_core/engine/tree.py" in imported_files("_core/engine/step.py")
