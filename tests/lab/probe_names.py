"""What one interpreter's torch has of some names: read as JSON from stdin, told as JSON on stdout.

`tests/lab/private_names.py` runs this file with the interpreters of several environments, so it
needs torch and nothing of this repository. A name is dotted (`torch._C._x`), or begins with a dot
where the object that has it is not known (`._local_tensor`): then some objects of torch's are
asked.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def find(name: str) -> Any:
    """Return what a dotted name names; AttributeError where a part is missing.

    A package may have a function of the same name as one of its modules: the module counts.
    """
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def signature_of(found: Any) -> str:
    """Return a callable's parameters without annotations; empty where Python cannot tell."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def look_up(names: Iterable[str], owners: Mapping[str, Any], sources: Path) -> dict[str, str]:
    """Return, for each name that exists, which objects have it and what its signature is.

    An attribute that none of the owners has may be one that code sets and torch looks for: then its
    name is a word of torch's sources.
    """
    there: dict[str, str] = {}
    unknown = []
    for name in names:
        attribute = name.removeprefix(".")
        if attribute == name:
            with contextlib.suppress(AttributeError):
                there[name] = signature_of(find(name))
            continue
        by = {
            of: getattr(owner, attribute)
            for of, owner in owners.items()
            if hasattr(owner, attribute)
        }
        if by:
            signatures = " or ".join(sorted({signature_of(value) for value in by.values()}))
            there[name] = f"of {', '.join(by)} {signatures}".rstrip()
        else:
            unknown.append(attribute)
    return there | {f".{word}": "a word of its sources" for word in words_in(sources, unknown)}


def words_in(folder: Path, words: Iterable[str]) -> set[str]:
    """Return those of the words that stand in a Python file below the folder."""
    wanted = set(words)
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        if wanted == found:
            break
        text = path.read_text(errors="replace")
        found |= {word for word in wanted - found if re.search(rf"\b{word}\b", text)}
    return found


def owners_of_torch() -> dict[str, Any]:
    """Return objects, or classes where these tell, whose attributes the package uses."""
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp.wrap import CustomPolicy
    from torch.distributed.tensor import DTensor

    return {
        "Tensor": torch.ones(1),
        "DTensor": DTensor,
        "UntypedStorage": torch.ones(1).untyped_storage(),
        "Module": torch.nn.Module(),
        "DeviceMesh": DeviceMesh,
        "ProcessGroup": ProcessGroup,
        "OpOverload": torch.ops.aten.add.Tensor,
        "CustomPolicy": CustomPolicy(lambda module: False),
    }


def main() -> None:
    import torch

    names = json.load(sys.stdin)
    there = look_up(names, owners_of_torch(), Path(torch.__file__).parent)
    print("\n" + json.dumps({"version": torch.__version__, "there": there}))


if __name__ == "__main__":
    main()
