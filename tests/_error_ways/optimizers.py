"""Ways to the messages of ``fsdp2/_errors/optimizers.md``."""

from __future__ import annotations

import torch
from torch import nn

import fsdp2
from tests._error_ways._programs import WIDTH, build, x
from tests._error_ways._way import way


@way("FS706", "EMA.swapped")
def _(mended: bool) -> None:
    model = build()
    average = fsdp2.optim.EMA(model)
    with average.swapped():
        if not mended:
            average.swapped().__enter__()
    with average.swapped():
        model(x())


@way("FS707", "0.weight", "average")
def _(mended: bool) -> None:
    model = build()
    average = fsdp2.optim.EMA(model)
    model[0].weight = nn.Parameter(torch.ones(WIDTH + 1, WIDTH))
    if mended:
        average = fsdp2.optim.EMA(model)
    average.update()
