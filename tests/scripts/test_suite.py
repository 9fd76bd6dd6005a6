"""Promise: the default suite keeps its budget, and has a test of every file of promises."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab.choose import BUDGET_S, LONGEST_S
from tests.lab.suite import Chosen

ROOT = Path(__file__).parents[2]
FOLDERS = ("behaviour", "unit", "sim", "docs", "pages")
POOL_ONLY = {
    "tests/behaviour/test_compiled_buckets.py": "all of it compiles with inductor",
    "tests/behaviour/test_compiled_overlap.py": "too long; test_traced.py has an overlapped step",
    "tests/behaviour/test_same_bits.py": "trains twice for each; pages of the manual compare runs",
    "tests/behaviour/test_same_bits_with.py": "trains on one, two and four ranks for each feature",
    "tests/docs/test_installed.py": "builds a wheel; in the stage of CI that has the site",
    "tests/docs/test_site.py": "needs the generator; a stage of CI of its own",
    "tests/pages/test_browser.py": "needs a browser",
    "tests/sim/test_stage.py": "asks every question of a stage of scripts/gpu",
    "tests/sim/test_clock.py": "plays whole models; test_device_clock.py has the rules",
}
REMEDY = "run scripts/choose, or write a line `seconds test` into tests/default.txt"


def test_the_budget_is_kept() -> None:
    """Seconds are those that were measured when the suite was chosen."""
    seconds = Chosen.read().seconds
    assert sum(seconds.values()) <= BUDGET_S, f"take a test out of tests/default.txt, or {REMEDY}"
    singles = {name: s for name, s in seconds.items() if "[" in name}
    assert max(singles.values()) <= LONGEST_S


def test_each_file_of_promises_has_a_default_test() -> None:
    files = {name.partition("::")[0] for name in Chosen.read().seconds}
    there = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    }
    assert not there - files - POOL_ONLY.keys(), REMEDY


def test_each_name_is_of_a_test_that_exists() -> None:
    """A name of none would be missed by nobody."""
    gone = []
    for name in sorted(Chosen.read().functions):
        path, _, function = name.partition("::")
        file = ROOT / path
        if not file.exists() or not re.search(rf"\bdef {function}\b", file.read_text()):
            gone.append(name)
    assert not gone, f"tests/default.txt names tests that are gone: {REMEDY}"
