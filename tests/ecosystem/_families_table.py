"""`scripts/ecosystem --families`: all families on two ranks, ours and torch's own, as a table.

Ranks live on from family to family. If a family ends its ranks, new ones train it and its
neighbours one by one, so it costs only itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from tests.ecosystem._families import (
    ALL,
    FAMILIES,
    UNTRIED,
    Family,
    Trained,
    tell_of_compiling,
    tell_of_trainings,
)
from tests.kit.pool import RankPool, _Run, make_request
from tests.kit.rank import PRELOADED
from tests.lab.ring import ring_order

TOGETHER = 5  # families that ranks train before they tell
LIMIT_S = 240.0  # of one family
RAISED = re.compile(r"^([\w.]*(?:Error|Exception|Unsupported|Failed)): ?(.*)$", re.MULTILINE)


def words(found: Trained) -> str:
    """Return the difference, or the error."""
    if found.difference == math.inf:
        return found.where.replace("|", "/")[:120]
    return f"{found.difference:.0e}" if found.difference else "same bits"


class Ranks:
    """Two ranks that live on from family to family."""

    def __init__(self) -> None:
        os.environ[PRELOADED] = "tests.ecosystem._families"
        self._run = _Run(notes_reach=False, patience=1.0)
        self._pool = RankPool(self._run)

    def train(self, families: Sequence[Family], library: str, compiled: bool) -> list[Trained]:
        names = [str(family) for family in families]
        found = self._tell(
            tell_of_trainings, 2, len(families), families=names, library=library, compiled=compiled
        )
        if isinstance(found, list):
            return found
        if len(families) == 1:
            return [Trained(0, math.inf, found)]
        return [one for family in families for one in self.train([family], library, compiled)]

    def compile_unsharded(self, family: Family) -> str:
        """Return the error of the unsharded model, if it is not one graph."""
        found = self._tell(tell_of_compiling, 1, 1, family=str(family))
        return found if isinstance(found, str) else ""

    def _tell(self, body: Any, world_size: int, count: int, **given: Any) -> list[Trained] | str:
        """Return what the ranks told of their families, or the error that ended them."""
        request = make_request(
            body, "families", world_size, given, limit_s=count * LIMIT_S, shares_world=True
        )
        outcome = self._pool.run(request)
        if outcome.kind == "skipped":
            return [Trained(*found) for found in json.loads(outcome.text)]
        raised = RAISED.findall(outcome.text) or [("a rank died", "or took too long")]
        return f"{raised[-1][0].rpartition('.')[2]}: {raised[-1][1]}"

    def close(self) -> None:
        self._pool.close()
        self._run.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/ecosystem --families", description=__doc__)
    parser.add_argument("names", nargs="*", help="families, as llama or llama-causal; else all")
    parser.add_argument("--compiled", action="store_true", help="by fsdp2.compile, fullgraph=True")
    given = parser.parse_args(arguments)
    chosen = set(given.names)
    families = [f for f in FAMILIES if not chosen or {f.name, str(f)} & chosen]
    ranks = Ranks()
    try:
        (compiled_table if given.compiled else eager_table)(ranks, families)
    finally:
        ranks.close()
    left_out = [family for family in ALL if family in UNTRIED]
    print(f"\nnot built here: {len(left_out)}")
    for family in left_out:
        print(f"- {family.name} ({family.task}): {UNTRIED[family]}")
    return 0


def eager_table(ranks: Ranks, families: Sequence[Family]) -> None:
    print("| family | task | blocks | ours | torch's own |\n|---|---|---:|---|---|", flush=True)
    found: dict[str, list[Trained]] = {"fsdp2": [], "torch": []}
    for start in range(0, len(families), TOGETHER):
        some = families[start : start + TOGETHER]
        for library, results in found.items():
            results += ranks.train(some, library, False)
        rows = zip(some, found["fsdp2"][start:], found["torch"][start:], strict=True)
        for family, ours, theirs in rows:
            print(
                f"| {family.name} | {family.task} | {ours.blocks} | {words(ours)} | "
                f"{words(theirs)} |",
                flush=True,
            )
    print(f"\n{len(families)} families, {sum(one.blocks for one in found['fsdp2'])} blocks")
    for library, results in found.items():
        numbers = [one.difference for one in results if one.difference < math.inf]
        print(
            f"{library}: {len(numbers)} trained, {numbers.count(0.0)} of them to the bit, largest "
            f"difference {max(numbers, default=0.0):.1e}; {len(results) - len(numbers)} errors"
        )


def compiled_table(ranks: Ranks, families: Sequence[Family]) -> None:
    """Print families as they come from the ring: what is ready is a sample of all."""
    print("| family | task | compiled | whose break |\n|---|---|---|---|", flush=True)
    by_name = {str(family): family for family in families}
    differences, whose = [], []
    for name in ring_order(by_name, "families"):
        (ours,) = ranks.train([by_name[name]], "fsdp2", True)
        breaks = ""
        if ours.difference == math.inf:
            plain = ranks.compile_unsharded(by_name[name])
            breaks = f"the unsharded model's, too: {plain[:120]}" if plain else "ours"
            whose.append(breaks)
        else:
            differences.append(ours.difference)
        print(
            f"| {by_name[name].name} | {by_name[name].task} | {words(ours)} | "
            f"{breaks.replace('|', '/')} |",
            flush=True,
        )
    print(
        f"\n{len(differences)} are one graph, largest difference "
        f"{max(differences, default=0.0):.1e}; {len(whose)} are not, and "
        f"{whose.count('ours')} of these are one graph unsharded"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
