"""A program as users write it. ``tests/test_types.py`` runs mypy over it, in strict mode.

A line that must be an error has a ``type: ignore`` with the error's code: mypy reports an ignore
that nothing needs. No test runs this file.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import fsdp2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def depth(self) -> int:
        return len(self.layers)


def shard() -> Net:
    model = Net()
    for layer in model.layers:
        fsdp2.fully_shard(layer, reshard_after_forward=False)
    fsdp2.fully_shard(model).set_requires_gradient_sync(False)
    root = fsdp2.fully_shard(model, mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16))
    assert_type(root, fsdp2.FSDPModule)
    root.set_modules_to_forward_prefetch([fsdp2.fully_shard(model.layers[0])])
    root.set_requires_gradient_sinc(False)  # type: ignore[operator]
    pair = fsdp2.fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)])
    pair[0].unshard(async_op=True)
    modules: list[nn.Module] = [*model.layers]
    assert_type(fsdp2.fully_shard(modules), list[fsdp2.FSDPModule])
    model = fsdp2.fully_shard(model)  # type: ignore[assignment]
    pair.unshard()  # type: ignore[attr-defined]
    fsdp2.fully_shard(model, reshard_after_foward=True)  # type: ignore[call-overload]
    fsdp2.fully_shard("model")  # type: ignore[call-overload]
    assert_type(model.depth(), int)  # the module keeps its own class under its own name
    return model


def step(model: Net) -> None:
    adamw = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=1e-3)
    assert_type(adamw, torch.optim.AdamW)
    muon = fsdp2.optim.whole(torch.optim.Muon, model.parameters(), lr=1e-3)
    assert_type(muon, torch.optim.Muon)
    assert_type(fsdp2.optim.offload_states(adamw), torch.optim.AdamW)
    with fsdp2.no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    assert_type(fsdp2.clip_grad_norm_(model.parameters(), 1.0), Tensor)
    adamw.step()
    adamw.stepp()  # type: ignore[attr-defined]
    muon.zero_grad(set_to_none=True)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda count: 1.0).step()


def save(model: Net, optimizer: torch.optim.Optimizer) -> None:
    fsdp2.checkpoint.save(Path("one"), model, optimizer)
    handle = fsdp2.checkpoint.save("two", model, optimizer, background=True)
    handle.wait()
    with fsdp2.summon_full_params(model, writeback=False):
        pass
    for name, tensor in fsdp2.full_params(model, max_bytes=2**20):
        assert_type(name, str)
        assert_type(tensor, Tensor)
    fsdp2.clip_grad_norm(model.parameters(), 1.0)  # type: ignore[attr-defined]
