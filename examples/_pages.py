"""HTML pages of a run: the plan of a step, and a recording of the last steps.

Defines their paths, and which steps are recorded. Contains no training code.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from _model import Block, Transformer
from _options import Options


class Pages:
    """The pages of one run, on one rank."""

    def __init__(self, options: Options, policy: fsdp2.MixedPrecisionPolicy) -> None:
        self._options = options
        self._policy = policy
        self._steps = options.pages_dir / "steps"
        # A compiled step cannot be recorded, because it is one graph.
        self.is_recorded = options.recorded_steps > 0 and options.backend is None

    @property
    def first_step(self) -> int:
        """The number of completed steps when the recording begins."""
        return max(self._options.stop_at - self._options.recorded_steps, 0)

    def recording(self, model: nn.Module) -> AbstractContextManager[object]:
        """Record the following steps, and replace the recordings of an earlier run."""
        if not self.is_recorded:
            return contextlib.nullcontext()
        if dist.get_rank() == 0:
            for earlier in self._steps.glob("rank*.jsonl"):
                earlier.unlink()
        dist.barrier()
        rows = self._options.batch_size // self._options.ranks
        return fsdp2.record(model, self._steps, tokens=rows * self._options.model.sequence_length)

    def draw(self) -> list[Path]:
        """Write the pages on the first rank, and return their paths."""
        dist.barrier()  # every rank has written its recording
        if dist.get_rank() != 0 or self._options.recorded_steps == 0:
            return []
        folder = self._options.pages_dir
        folder.mkdir(parents=True, exist_ok=True)
        plan, drawn = self._plan(), [folder / "plan.html"]
        plan.html(drawn[0])
        if self.is_recorded and self._steps.exists():
            drawn.append(folder / "recording.html")
            fsdp2.read_recordings(self._steps).html(drawn[1], planned=plan.planned())
        return drawn

    def _plan(self) -> fsdp2.plans.Plan:
        options = self._options
        with torch.device("meta"):
            model = Transformer(options.model)
        rows = options.batch_size // options.ranks
        batch = torch.zeros(rows, options.model.sequence_length, dtype=torch.long)
        return fsdp2.plan(
            model,
            mesh=options.mesh,
            policy={Block},
            mp_policy=self._policy,
            batch=(batch, batch),
            optimizer=torch.optim.AdamW,
        )
