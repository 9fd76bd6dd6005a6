"""Ask one GPU everything that is believed of it: ``scripts/gpu``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import date
from pathlib import Path

from benchmarks.gpu._driver import FAILED, LATE, Stage, run_stages

SECONDS = {
    "smoke": 40,
    "right": 120,
    "graph": 100,
    "step": 80,
    "copies": 50,
    "offload": 60,
    "costs": 60,
    "idle": 30,
    "memory": 40,
    "compiled": 60,
}
"""The stages, in the order of their worth, each with its share of the time.

A new stage is a line here, and a file of this folder with the same name.
"""
REHEARSAL_MINUTES = 5.0  # what it may take on a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--minutes", type=float, help="all is over before (8)")
    parser.add_argument("--only", nargs="+", choices=list(SECONDS), metavar="STAGE")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER")
    parser.add_argument(
        "--rehearse", action="store_true", help="the smallest sizes, on CPUs and gloo"
    )
    given = parser.parse_args()
    minutes = given.minutes or (REHEARSAL_MINUTES if given.rehearse else 8.0)
    environment = dict(os.environ)
    # torch's other way to count devices must not be called before ranks are forked
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if given.rehearse:
        environment |= {"FSDP2_GPU_REHEARSES": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1"}
    stages = [
        Stage(name, seconds, [sys.executable, "-m", f"benchmarks.gpu.{name}"])
        for name, seconds in SECONDS.items()
        if given.only is None or name in given.only
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stage does not outlive this
    about = f"`scripts/gpu --minutes {minutes:g}`, {date.today()}."
    if given.rehearse:
        about = "A rehearsal: its figures mean nothing."
    outcomes = run_stages(
        stages, minutes * 60, given.out, environment, about, lambda line: print(line, flush=True)
    )
    return int(any(outcome.verdict in (FAILED, LATE) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
