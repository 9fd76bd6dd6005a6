"""`scripts/private-names`: it finds private names in a source, and says what each version has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from tests import test_layers
from tests.lab import private_names, probe_names
from tests.lab.private_names import Row, Torch, compare, table, unguarded
from tests.lab.private_uses import Use, uses_in, uses_of_the_package

SOURCE = """\
import made._hidden.thing as thing
from made import tool, _Kind as Kind
from made.contract import KEY
import other._not_asked_about

limit = tool._limit
frames = thing.frames
get_spec: object = attrgetter("_spec")
HAS_NEW = hasattr(tool, "_new")

class Ours:
    def __init__(self, given):
        self._mine = given._theirs
        self._module = thing

    def call(self, given):
        given._mine = True
        self._module.start()
        frames.Action.skip(vars(tool)["_private_table"])
        thing.patch(some_setting=True)
        return Kind.make(tool.public)
"""


def names_in(source: str) -> list[str]:
    return [
        use.name + (" (guarded)" if use.is_guarded else "")
        for use in sorted(uses_in(source, "file.py", "made"), key=lambda use: use.line)
    ]


def test_names_in_a_source() -> None:
    """Imports, what they are called here, attributes of objects, tables and settings."""
    assert_expected_inline(
        "\n".join(dict.fromkeys(names_in(SOURCE))),
        """\
made._hidden.thing
made._Kind
made.tool._limit
made._hidden.thing.frames
._spec
made.tool._new (guarded)
._theirs
made._hidden.thing.start
made._hidden.thing.frames.Action.skip
made.tool._private_table
made._hidden.thing.some_setting
made._hidden.thing.patch
made._Kind.make""",
    )


@pytest.mark.parametrize(
    ("lines", "is_guarded"),
    [
        ("try:\n    from made import _a\nexcept ImportError:\n    _a = None", True),
        ("try:\n    b = made._a\nexcept (KeyError, AttributeError):\n    b = None", True),
        ("try:\n    b = made._a()\nexcept RuntimeError:\n    b = None", False),
        ("try:\n    b = None\nexcept AttributeError:\n    b = made._a", False),
        ("if hasattr(made, 'public'):\n    b = made._a", True),
        ("if made.__version__ >= '2':\n    b = 1\nelse:\n    b = made._a", True),
        ("b = made._a if VERSION > (2, 13) else None", True),
        ("HAS = hasattr(made, 'public')\nb = made._a if HAS else None", True),
        ("if made.public:\n    b = made._a", False),
        ("b = getattr(made, '_a', None)", True),
        ("b = getattr(made, '_a')", False),
        ("made._a()", False),
    ],
)
def test_what_counts_as_a_guard(lines: str, is_guarded: bool) -> None:
    uses = uses_in(f"import made\n{lines}", "file.py", "made")
    assert {(use.name, use.is_guarded) for use in uses} == {("made._a", is_guarded)}


def test_the_table() -> None:
    """The oldest version that has a name is what the others are compared with."""
    uses = [
        Use("made._gone", "one.py", 3, False),
        Use("made._gone", "two.py", 5, True),
        Use("made._new", "one.py", 7, True),
        Use("made._step", "one.py", 8, False),
        Use("made._step._far", "one.py", 8, False),
        Use("made._step._far", "one.py", 9, False),
    ]
    torchs = [
        Torch("2.9.1", {"made._gone": "", "made._step._far": "(a)"}),
        Torch("2.11.0+cpu", {"made._gone": "", "made._step._far": "(a)"}),
        Torch("2.15.0", {"made._new": "(b)", "made._step._far": "(a, c=1)"}),
    ]
    rows = compare(uses, torchs)
    assert_expected_inline(
        table(rows, torchs),
        """\
name             where               guarded  2.9.1    2.11.0+cpu  2.15.0
made._gone       one.py:3, two.py:5           same     same        missing
made._new        one.py:7            yes      missing  missing     same
made._step._far  one.py:8,9                   same     same        changed: (a, c=1)""",
    )
    assert unguarded(rows, torchs, (2, 11)) == [("made._gone", "2.15.0")]
    lacks_it = [Row("made._x", "one.py:1", False, ("missing", "same", "missing"))]
    assert unguarded(lacks_it, torchs, (2, 11)) == [("made._x", "2.15.0")]
    assert len(unguarded(lacks_it, torchs, (2, 9))) == 2


def test_what_a_version_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module counts before a function of its name; what is set on objects is a word."""
    made = tmp_path / "made_up"
    made.mkdir()
    (made / "__init__.py").write_text("from .contract import contract\nclass _Kind: ...\n")
    (made / "contract.py").write_text("KEY = 1\ndef contract(a: int, *, _b=object): ...\n")
    (made / "reader.py").write_text("def read(x): return getattr(x, '_is_set', False)\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = [
        "made_up.contract.KEY",
        "made_up.contract.contract",
        "made_up._Kind",
        "made_up._Kind._lost",
        "made_up._lost.thing",
        "._given",
        "._is_set",
        "._is",
    ]

    class Owner:
        def _given(self, x: int = 3) -> None: ...

    try:
        there = probe_names.look_up(names, {"Owner": Owner, "Other": 1}, made)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
            del sys.modules[name]
    assert there == {
        "made_up.contract.KEY": "",
        "made_up.contract.contract": "(a, *, _b=<class 'object'>)",
        "made_up._Kind": "()",
        "._given": "of Owner (self, x=3)",
        "._is_set": "a word of its sources",
    }


def test_environments(tmp_path: Path) -> None:
    """Those that were made, and the user's own interpreter."""
    for folder in (".venv/bin", ".venvs/torch-2.15.0/bin", ".venvs/torch-2.11.0/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").touch()
    (tmp_path / ".venvs" / "torch-2.14.1").mkdir()
    found = private_names.interpreters(tmp_path, "/own/python")
    assert [path.relative_to(tmp_path).parts[:2] for path in found[:-1]] == [
        (".venv", "bin"),
        (".venvs", "torch-2.11.0"),
        (".venvs", "torch-2.15.0"),
    ]
    assert found[-1] == Path("/own/python")
    assert len(private_names.interpreters(tmp_path, None)) == 3


def test_every_private_name_of_the_package_is_found() -> None:
    """What the rule about files sees, the report sees too."""
    found = {part for use in uses_of_the_package() for part in use.name.split(".")}
    for file in test_layers.OF_TORCH:
        parts = {part for name in test_layers.torch_imports(file) for part in name.split(".")}
        private = {part for part in parts if test_layers.is_private(part)}
        assert private | test_layers.foreign_private_names(file) <= found


def test_the_version_that_is_needed() -> None:
    text = (private_names.ROOT / "pyproject.toml").read_text()
    assert private_names.oldest_supported(text) >= (2, 11)
    assert private_names.version_number("2.15.0a0+git1234") == (2, 15, 0)
