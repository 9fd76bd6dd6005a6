"""Promise: each planted fault fits the package, also after code was moved or reformatted."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fuzz._faults import OWN
from tests.lab.faults import FAULTS, Fault
from tests.lab.mutants import functions_of
from tests.lab.plant import Package, Planted
from tests.sim._faults import FAULTS as SIMULATED

ROOT = Path(__file__).parents[2]
HERE, ELSEWHERE = "fsdp2/here.py", "fsdp2/inner/elsewhere.py"
SOURCE = """\
LIMIT = 3  # of a queue


class Queue:
    size: int = 2

    def release(self, items: list[Item], *, by_hand: bool) -> list[Item]:
        # This comment stays.
        for item in items:
            item.wait()
        if by_hand and self.size > 0:
            self.free(items[0], "by hand")
        elif self.size == LIMIT:
            first = items[0]
            first.free()
        return [
            item.copy()  # and this one goes
            for item in items
            if item.numel > LIMIT
        ]
"""


def fault(where: str, old: str, new: str, file: str = HERE) -> Fault:
    return Fault("a-fault", file, where, old, new, "something", near=())


EXPRESSION = fault("Queue.release", "by_hand and self.size > 0", "by_hand or self.size > 0")
BRANCH = "if self.size == LIMIT:\n    first = items[0]\n    ..."
KINDS = {
    "expression": (EXPRESSION, "by_hand and self.size > 0", "by_hand or self.size > 0"),
    "longer expression": (
        fault(
            "Queue.release",
            "[item.copy() for item in items if item.numel > LIMIT]",
            "[item for item in items]",
        ),
        re.compile(r"item.copy\(\) .*\n(.*\n).*> LIMIT"),
        r"item\n\1",
    ),
    "statements": (
        fault("Queue.release", "first = items[0]\nfirst.free()", "first = items[1]"),
        re.compile(r"items\[0\]\n +first.free\(\)"),
        "items[1]",
    ),
    "no statements": (
        fault("Queue.release", "for item in items:\n    item.wait()", ""),
        re.compile(r" +for item in items:\n +item.wait\(\)\n"),
        "",
    ),
    "an empty block": (fault("Queue.release", "item.wait()", ""), "item.wait()", "pass"),
    "a branch": (
        fault("Queue.release", BRANCH, BRANCH.replace("==", "!=")),
        "self.size == LIMIT",
        "self.size != LIMIT",
    ),
    "what precedes a branch": (
        fault("Queue.release", "if by_hand and self.size > 0:\n    ...\nelse:\n    ...", "..."),
        re.compile(r"if by_hand.*\n    ( +self.free.*)\n(.*\n){3}"),
        r"self.free(items[0], 'by hand')\n",
    ),
    "a class": (
        fault("Queue", "class Queue:\n    ...", "class Queue(list):\n    ..."),
        "ue:",
        "ue(list):",
    ),
    "in a class": (fault("Queue", "size: int = 2", "size: int = 1"), "= 2", "= 1"),
    "in a module": (fault("", "LIMIT = 3", "LIMIT = 4"), "= 3", "= 4"),
}


def plant(folder: Path, fault: Fault, source: str, file: str = HERE) -> Planted:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return Package(folder).plant(fault)


def tree(source: str) -> str:
    return ast.dump(ast.parse(source))


@pytest.mark.parametrize("faults", [FAULTS, SIMULATED, OWN], ids=["mutants", "sim", "fuzz"])
def test_every_fault_fits_the_package(faults: Sequence[Fault]) -> None:
    package = Package(ROOT)
    wrong = []
    for each in faults:
        try:
            planted = package.plant(each)
            compile(planted.source, planted.file, "exec")
        except (SystemExit, SyntaxError) as error:
            wrong.append(f"{each.name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_what_it_says(tmp_path: Path, kind: str) -> None:
    fault, old, new = KINDS[kind]
    found = re.compile(re.escape(old)) if isinstance(old, str) else old
    expected, count = found.subn(new, SOURCE)
    assert count == 1
    assert tree(plant(tmp_path, fault, SOURCE).source) == tree(expected)


def test_lines_beside_a_fault_stay(tmp_path: Path) -> None:
    sound = SOURCE.splitlines()
    for fault, _, _ in KINDS.values():
        planted = plant(tmp_path, fault, SOURCE)
        lines = planted.source.replace("else:\n            if", "elif").splitlines()  # one of ours
        assert lines[: planted.first - 1] == sound[: planted.first - 1]
        assert lines[planted.last :] == sound[planted.last :]


@pytest.mark.parametrize("kind", KINDS)
def test_layout_local_names_and_the_file_do_not_matter(tmp_path: Path, kind: str) -> None:
    fault, _, _ = KINDS[kind]
    wanted = plant(tmp_path, fault, SOURCE).source
    assert tree(plant(tmp_path, fault, ast.unparse(ast.parse(SOURCE))).source) == tree(wanted)

    def renamed(source: str) -> str:
        return re.sub(r"\b(item|items|by_hand|first|self)\b", r"\1_", source)

    assert tree(plant(tmp_path, fault, renamed(SOURCE)).source) == tree(renamed(wanted))
    (tmp_path / HERE).write_text("LIMIT = 3\n" if not fault.where else "")
    if fault.where:
        moved = plant(tmp_path, fault, SOURCE, ELSEWHERE)
        assert (moved.file, moved.source) == (ELSEWHERE, wanted)


def test_of_two_functions_the_hint_decides_and_then_the_pattern(tmp_path: Path) -> None:
    plant(tmp_path, EXPRESSION, SOURCE, ELSEWHERE)
    assert plant(tmp_path, EXPRESSION, SOURCE).file == HERE
    lost = fault(EXPRESSION.where, EXPRESSION.old, EXPRESSION.new, file="fsdp2/gone.py")
    with pytest.raises(SystemExit, match=f"more than one file has it: {HERE}:7, {ELSEWHERE}:7"):
        Package(tmp_path).plant(lost)
    (tmp_path / HERE).write_text(SOURCE.replace("by_hand and", "by_hand or"))
    assert Package(tmp_path).plant(lost).file == ELSEWHERE


@pytest.mark.parametrize(
    ("where", "old", "new", "said"),
    [
        ("Queue.relaese", "item.wait()", "", f"the nearest is 'Queue.release', {HERE}:7"),
        (
            "Queue.release",
            "for item in items:\n    item.wait_for_it()",
            "",
            f"the nearest is\n  {HERE}:9: for item in items: item.wait()",
        ),
        (
            "Queue.release",
            "by_hand and self.count > 0",
            "by_hand",
            f"the nearest is\n  {HERE}:11: by_hand and self.size > 0",
        ),
        (
            "Queue.release",
            "items[0]",
            "items[1]",
            f"fits 2 times in Queue.release\n  {HERE}:12: items[0]\n  {HERE}:14: items[0]",
        ),
        ("Queue.release", "item.wait()", "first.wait()", "`old` says nothing of first"),
        ("Queue.release", "self.size == limit", "False", "fits 0 times"),  # of a global name
        ("Queue.release", "self.size == size", "False", "fits 0 times"),
        ("Queue", "size: int = True", "size: int = 1", "fits 0 times"),
    ],
)
def test_what_does_not_fit_says_what_is_nearest(
    tmp_path: Path, where: str, old: str, new: str, said: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        plant(tmp_path, fault(where, old, new), SOURCE)
    assert str(raised.value).startswith("a-fault: ")
    assert said in str(raised.value)


def test_the_map_is_asked_for_the_function_where_it_lies(tmp_path: Path) -> None:
    planted = plant(tmp_path, EXPRESSION, SOURCE, ELSEWHERE)
    assert functions_of(planted, Package(tmp_path)) == {"inner/elsewhere.py:7"}
    planted = plant(tmp_path, KINDS["in a class"][0], SOURCE)
    assert functions_of(planted, Package(tmp_path)) == set()
