"""One process of `benchmarks.step.record`: count a step that is recorded, and one that is not.

`python -m benchmarks.kit.record_worker REQUEST`, where REQUEST is JSON; run under callgrind by its
parent, it closes one window a depth and mode. Not meant to be called by hand.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import fsdp2
from benchmarks.kit import callgrind, models, noop

MODES = ("off", "on", "off again")


def make_label(mode: str, depth: int) -> str:
    return f"{mode}, {depth}"


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _, mesh = noop.start(request["world_size"])
    gc.disable()
    for depth in request["depths"]:
        size = models.Size(depth)
        model = models.build("fsdp2", size, mesh, bf16=False)
        step = models.make_step(model, models.make_input("fsdp2", size, bf16=False))
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                recording: AbstractContextManager[Any] = nullcontext()
                if mode == "on":
                    recording = fsdp2.record(model, Path(folder))
                with recording:
                    for _ in range(request["warmup"]):
                        step()
                    with callgrind.Counter().window(make_label(mode, depth)):
                        for _ in range(request["steps"]):
                            step()


if __name__ == "__main__":
    main()
