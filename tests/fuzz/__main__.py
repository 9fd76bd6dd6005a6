"""`scripts/fuzz`: random programs on ranks, beside the unsharded model."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz._faults import MOST
from tests.fuzz._faults import main as meet_faults
from tests.fuzz._program import parse
from tests.fuzz._search import Ranks, Search
from tests.fuzz._threads import Threads

EXAMPLES = 50  # of a seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, with commas")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of one process")
    parser.add_argument("--seeds", default="0:3", metavar="A:B", help="from A up to B")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="for each seed and number")
    parser.add_argument("--minutes", type=float, help="go on with further seeds until then")
    parser.add_argument("--most", type=int, default=10**9, help="examples in all")
    parser.add_argument(
        "--pin", nargs="*", default=(), metavar="FIELD=VALUE", help="of the setup: precision=half"
    )
    parser.add_argument("--program", metavar="FILE", help="run this one; - is the standard input")
    parser.add_argument("--until-first", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--faults", nargs="*", metavar="NAME", help="plant faults, count examples")
    given = parser.parse_args()
    if given.faults is not None:
        return meet_faults(given.faults, given.ranks, min(given.most, MOST))
    ranks = Threads() if given.threads else Ranks()
    try:
        if given.program is not None:
            text = sys.stdin.read() if given.program == "-" else Path(given.program).read_text()
            found = ranks.run(parse(text))
            print("passed" if found is None else f"{found.signature}\n{found.report}")
            return found is not None
        return search(ranks, given)
    finally:
        ranks.close()


def search(ranks: Ranks, given: argparse.Namespace) -> int:
    begun = time.monotonic()
    deadline = begun + (given.minutes * 60 if given.minutes else 10**9)
    pinned = tuple(
        (name, value_of(text)) for name, _, text in (p.partition("=") for p in given.pin)
    )
    doing = Search(
        ranks,
        is_shrinking=not given.no_shrink,
        until_first=given.until_first,
        pinned=pinned,
    )
    for seed, world_size in rounds(given):
        left = given.most - doing.examples
        if left <= 0 or time.monotonic() > deadline or (given.until_first and doing.found):
            break
        doing.round(world_size, seed, min(given.examples, left), deadline)
        passed = time.monotonic() - begun
        print(
            f"seed {seed}, {world_size} ranks: {doing.examples} programs in {passed:.0f} s, "
            f"{doing.examples / passed * 60:.0f} a minute; {len(doing.found)} defects",
            flush=True,
        )
    for signature, count in doing.again.items():
        print(f"again: {count} times {signature}")
    for code, count in doing.refused.items():
        print(f"refused: {count} times {code}")
    for line in doing.flaky:
        print(f"flaky: {line}")
    if given.report is not None:
        found = {signature: str(found.program) for signature, found in doing.found.items()}
        given.report.write_text(json.dumps({"examples": doing.examples, "found": found}, indent=1))
    return bool(doing.found or doing.flaky)


def value_of(text: str) -> Any:
    """Return a number, a bool or None as that, and a word as it is."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def rounds(given: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Return seeds and numbers of ranks; without end, if only time ends them."""
    first, last = (int(part) for part in given.seeds.split(":"))
    for seed in itertools.count(first) if given.minutes else range(first, last):
        for world_size in map(int, given.ranks.split(",")):
            yield seed, world_size


if __name__ == "__main__":
    sys.exit(main())
