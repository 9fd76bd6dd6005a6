"""How many kernels pack the gradients of a group, where kernels are CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2._core.comm.wire import Wire
from fsdp2._core.params import gradient_packing
from fsdp2._core.params.layout import ReduceLayout, ShardLayout
from tests.kit import sim
from tests.kit.pool import RunOnRanks, make_request
from tests.sim.test_scenarios import simulator

__all__ = ["simulator"]  # a fixture

SHAPES = [(13, 29), (29,), (7, 29), (7,)]


def count_kernels(size: int, kind: str) -> None:
    """Pack gradients of a rank of ``size``, and compare values and the count of operations."""
    shards = [ShardLayout(shape, torch.empty(shape).stride(), 0, size) for shape in SHAPES]
    layout = ReduceLayout.plan(range(4), shards, size, torch.float32, 4)
    grads: list[Tensor | None] = [torch.randn(shape) for shape in SHAPES]
    if kind == "permuted":
        grads[0] = torch.randn(29, 13).t()
    behind = complete = gradient_packing.tail([], layout, torch.float32, torch.device("sim", 0))
    if kind == "missing":
        grads[2] = None
        behind = gradient_packing.tail_without(complete, [2], layout)
    args = layout, 0, behind, Wire().allocate
    before, *_ = sim.load().counts()
    (out,) = gradient_packing.pack_gradients(grads, *args)
    after, *_ = sim.load().counts()
    host = [None if grad is None else grad.to("cpu") for grad in grads]
    args = layout, 0, behind.to("cpu"), Wire().allocate
    (on_host,) = gradient_packing.pack_gradients(host, *args)
    assert torch.equal(out.to("cpu"), on_host)
    assert after - before == (1 if kind == "plain" else 2)  # the other is that gradient's own


count_kernels.body = count_kernels  # type: ignore[attr-defined]  # what a rank looks for


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "permuted", "missing"])
@pytest.mark.usefixtures("simulator")
def test_one_kernel_packs_a_group(
    size: int, kind: str, run_on_ranks: RunOnRanks, request: pytest.FixtureRequest
) -> None:
    """Whatever the number of ranks is; a gradient that is permuted, or missing, costs one more."""
    given: dict[str, Any] = {"size": size, "kind": kind}
    run_on_ranks(make_request(count_kernels, request.node.nodeid, 1, given, device="sim"))
