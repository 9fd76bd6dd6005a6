"""Promise: what the paragraph of an error says leads to that error, and its remedy mends it.

The programs are in `tests/kit/error_ways`, a file for each of `fsdp2/_core/errors`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2._core.base.paragraphs import read_paragraphs
from tests.kit.error_ways import ELSEWHERE, WAYS, Way
from tests.kit.error_ways._programs import MADE, Net
from tests.kit.meshes import DEVICE
from tests.kit.pool import ranks

ROOT = Path(__file__).parents[2]
PARAGRAPHS = {p.code: p for p in read_paragraphs() if not p.is_retired}
ALONE = [key for key, chosen in WAYS.items() if chosen.alone]
ON_RANKS = [key for key in WAYS if key not in ALONE]

ON_CPU = ("FS8", "FS905", "FS907", "FS911")
"""Codes, or how they begin, whose ways compile or plan a sharded model."""


def message_of(chosen: Way) -> str:
    """Run a program as it is wrong, and return the error or the warning that it ends in."""
    text, code = "", chosen.code
    with noted_warnings(code) as warned:
        try:
            chosen.program(False)
        except fsdp2.FSDPError as error:
            text, code = str(error), error.code
        except AttributeError as error:  # what Python wants for a name that is not there
            text = str(error)
    text = text or next(iter(warned), "")
    assert not text or text.endswith(f"[{code}]"), text
    return text


@contextlib.contextmanager
def noted_warnings(code: str) -> Iterator[list[str]]:
    """Give a list that has the warnings with a code when the context ends."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in warned if code in str(w.message)]


def check(chosen: Way, gets_it: bool = True) -> None:
    text = message_of(chosen)
    if gets_it:
        assert text, f"no error, and no warning with {chosen.code}"
        assert f"[{chosen.code}]" in text, text  # or inside of another: which ranks failed, and why
        for word in chosen.words:
            assert word in text, f"{word!r} is not in {text!r}"
    else:
        assert not text
    with noted_warnings(chosen.code) as warned:
        chosen.program(True)
    assert not warned


@pytest.mark.parametrize("key", ON_RANKS)
@ranks(2, limit_s=200)
def test_a_way_leads_there_and_its_remedy_elsewhere(key: str, rank: int) -> None:
    chosen = WAYS[key]
    if DEVICE != "cpu" and (chosen.code.startswith(ON_CPU) or "compiled" in key):
        pytest.skip("gloo has no functional collectives for a device, and plans have none")
    check(chosen, rank in chosen.on)
    dist.barrier()
    while MADE:
        shutil.rmtree(MADE.pop(), ignore_errors=True)


@pytest.mark.parametrize("key", ALONE)
def test_a_way_without_ranks(key: str) -> None:
    check(WAYS[key])


@pytest.mark.parametrize("mended", [False, True])
@ranks(1, with_process_group=False)
def test_no_process_group(mended: bool) -> None:
    """FS218: a launcher tells the processes of each other. A mesh needs a process group too."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if mended or name not in names}
    with mock.patch.dict(os.environ, kept, clear=True):
        if mended:
            fsdp2.fully_shard(Net())
            dist.destroy_process_group()
            return
        with pytest.raises(fsdp2.ConfigError, match="torchrun") as caught:
            fsdp2.fully_shard(Net())
        assert caught.value.code == "FS218"
        with pytest.raises(ValueError, match="environment variable"):
            init_device_mesh(DEVICE, (1,))


def test_every_code_has_a_way_or_a_test_elsewhere() -> None:
    covered = {chosen.code for chosen in WAYS.values()}
    assert not covered & set(ELSEWHERE), "a way is enough"
    missing = sorted(set(PARAGRAPHS) - covered - set(ELSEWHERE))
    assert not missing, (
        f"{missing} have no way. Write the shortest program that ends in each, and does what its "
        "paragraph says where `mended`, into tests/kit/error_ways. If none can, name the test that "
        "raises it in tests/kit/error_ways/_elsewhere.py"
    )
    unknown = sorted((covered | set(ELSEWHERE)) - set(PARAGRAPHS))
    assert not unknown, f"no paragraph, or a retired one, has the codes {unknown}"


def test_ways_stand_in_the_file_of_their_paragraphs_name() -> None:
    for key, chosen in WAYS.items():
        found = chosen.program.__module__.rpartition(".")[2]
        assert f"{found}.md" == PARAGRAPHS[chosen.code].file, key


@pytest.mark.parametrize("code", ELSEWHERE)
def test_the_test_elsewhere_exists(code: str) -> None:
    path, name = ELSEWHERE[code].test.split("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.startswith("test_")
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
