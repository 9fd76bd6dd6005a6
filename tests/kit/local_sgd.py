"""SGD on what each rank holds, for tests that are not about optimizers.

An optimizer's ops on `DTensor` cost more than most that such a test is about: torch tries each
placement of each operand on each axis of the mesh, once for each shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LocalSGD(torch.optim.Optimizer):
    """What `torch.optim.SGD` computes, from gradients that lie as their parameters do."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], group["momentum"])

    def _update(self, param: Tensor, grad: Tensor, lr: float, momentum: float) -> None:
        if isinstance(param, DTensor):
            assert isinstance(grad, DTensor)
            assert grad.device_mesh == param.device_mesh
            assert grad.placements == param.placements
            local, grad = param.to_local(), grad.to_local()
        else:
            local = param
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(local)
        local.add_(state["momentum"].mul_(momentum).add_(grad), alpha=-lr)
