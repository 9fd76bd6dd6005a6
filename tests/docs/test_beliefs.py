"""Each sentence that says that no device has shown something has a row in the table of beliefs."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.docs._blocks import ROOT

BELIEFS = ROOT / "benchmarks" / "results" / "gpu" / "beliefs.md"
PLACES = (
    "README.md",
    "docs/**/*.md",
    "benchmarks/README.md",
    "fsdp2/_tools/plan/*.py",
    "fsdp2/_tools/plan/*.json",
    "fsdp2/_core/base/*.py",
)
MARK = re.compile(
    r"\b[Aa]ssumed\b|model's word|\bNo (GPU|cluster) has|No test captures|"
    r"[Nn]ot measured\b|never (been )?run on|has been measured"
)
NO_BELIEF = (
    'the word "assumed"',  # the rule for marks
    "; 26 ok, 3 not measured",  # verdicts of the doctor
    "`not measured`",
)
ROW = re.compile(r"^\|[^|]+\| `([^`|]+)`: ([^|]+?) \|[^|]+\|[^|]+\|[^|]+\|$", re.MULTILINE)


def test_each_mark_has_a_row_and_each_row_a_mark() -> None:
    rows = defaultdict(set)
    for path, excerpt in ROW.findall(BELIEFS.read_text()):
        rows[path].add(excerpt)
    assert rows
    missing, cited = [], defaultdict(set)
    for path in sorted({path for place in PLACES for path in ROOT.glob(place)}):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not MARK.search(line) or any(words in line for words in NO_BELIEF):
                continue
            found = {excerpt for excerpt in rows[name] if excerpt in line}
            cited[name] |= found
            if not found:
                missing.append(f"{name}:{number}: {line.strip()}")
    assert not missing, f"add a row to {BELIEFS.relative_to(ROOT)}"
    stale = {name: gone for name in rows if (gone := rows[name] - cited[name])}
    assert not stale, "these rows cite what no document says"
