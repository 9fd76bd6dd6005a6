"""``python -m tests.hostile``: change each kind of file many times, and say what came of it.

python -m tests.hostile --count 1000          # of each kind
python -m tests.hostile --count 100 --kind index --seed 7
python -m tests.hostile --by-hand             # the files that were made to do harm
python -m tests.hostile --growing             # in sizes that double: what they take
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hostile._by_hand import load, trials
from tests.hostile._growing import WRITES
from tests.hostile._growing import load as load_both
from tests.hostile._kinds import KINDS
from tests.hostile._many import faults_of, table_of, tried_many
from tests.hostile._tried import tried


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS])
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--growing", action="store_true")
    given = parser.parse_args()
    if given.growing:
        return _growing()
    if given.by_hand:
        return _by_hand()
    faults = 0
    for kind in given.kind or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            seeds = range(given.seed, given.seed + given.count)
            found = tried_many(KINDS[kind], Path(folder), seeds)
        print(table_of(kind, found), flush=True)
        for seed, outcome in faults_of(found).items():
            faults += 1
            print(f"    seed {seed}: {outcome.what}: {outcome.text}", flush=True)
    return min(faults, 1)


def _by_hand() -> int:
    for name, write in trials().items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            write(path)
            found = tried(lambda path=path: load(path))  # type: ignore[misc]
        mib = found.nbytes / (1 << 20)
        print(f"{name:<44} {found.what:<12} {found.seconds:6.2f} s {mib:8.1f} MiB", flush=True)
    return 0


def _growing() -> int:
    for name, write in WRITES.items():
        rows = []
        for size in (25_000, 50_000, 100_000):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "saved"
                write(path, size)
                nbytes = sum(one.stat().st_size for one in path.iterdir())
                found = tried(lambda path=path: load_both(path), limit_s=60)  # type: ignore[misc]
            mib = (nbytes / (1 << 20), found.nbytes / (1 << 20))
            rows.append(f"{mib[0]:5.2f} MiB {found.what} {found.seconds:5.2f} s {mib[1]:4.0f} MiB")
        print(f"{name:<44} {' | '.join(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
