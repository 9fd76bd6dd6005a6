"""Which tests a change touches: from a diff's lines to functions, and from these to tests."""

from __future__ import annotations

import ast
import json

from tests.lab.touched import ENTERED, changed_lines, functions_at, qualified_names

DIFF = """\
diff --git a/fsdp2/a.py b/fsdp2/a.py
--- a/fsdp2/a.py
+++ b/fsdp2/a.py
@@ -3 +3,2 @@ class A:
-old
+new
+new
@@ -20,2 +21,0 @@ class A:
-gone
-gone
diff --git a/tests/test_b.py b/tests/test_b.py
--- /dev/null
+++ b/tests/test_b.py
@@ -0,0 +1 @@
+new
diff --git a/fsdp2/c.py b/fsdp2/c.py
--- a/fsdp2/c.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""
SOURCE = """\
import os

@os.cache
def first():
    def inner():
        pass
    return inner

class A:
    def method(self):
        return 1
"""


def test_lines_of_a_diff() -> None:
    assert changed_lines(DIFF) == {"fsdp2/a.py": {3, 4, 21}, "tests/test_b.py": {1}}


def test_functions_at_lines() -> None:
    assert functions_at(SOURCE, {3}) == {"first"}
    assert functions_at(SOURCE, {6}) == {"first", "first.<locals>.inner"}
    assert functions_at(SOURCE, {11}) == {"A.method"}
    assert functions_at(SOURCE, {1, 9}) == set()


def test_names_are_those_of_python() -> None:
    """As `__qualname__` has them."""
    names = [name for name, _, _ in qualified_names(ast.parse(SOURCE))]
    assert names == ["first", "first.<locals>.inner", "A.method"]


def test_the_map_names_tests_of_a_function_that_few_enter() -> None:
    known = json.loads(ENTERED.read_text())
    entering = {
        known["tests"][n] for n in known["entered"]["_core/base/paragraphs.py::read_paragraphs"]
    }
    assert any("paragraph" in test or "explain" in test for test in entering), entering
    assert len(known["entered"]) > 500
