"""Ways to the messages of ``fsdp2/_core/errors/optimizers.md``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import fsdp2
from fsdp2 import checkpoint
from tests.kit.error_ways._programs import WIDTH, Net, build, x
from tests.kit.error_ways._way import way


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


@way("FS701", "SGD", "after fully_shard")
def _(mended: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.fully_shard(model)
    if mended:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x()).sum().backward()
    optimizer.step()


@way("FS701", "SGD", "reshard()", name="while unsharded")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Net())
    model.unshard()
    if mended:
        model.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    model(x()).sum().backward()
    optimizer.step()


@way("FS702", "Muon", "elementwise=True does not make Muon element-wise")
def _(mended: bool) -> None:
    model = build()
    params, kind = [layer.weight for layer in model], torch.optim.Muon
    optimizer = kind(params) if mended else fsdp2.optim.local(kind, params)
    model(x()).sum().backward()
    optimizer.step()


class Signs(torch.optim.Optimizer):
    """Element-wise, and not of torch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= 0.1 * param.grad.sign()


@way("FS702", "Signs", "elementwise=True", name="own class")
def _(mended: bool) -> None:
    model = build()
    optimizer = fsdp2.optim.local(Signs, model.parameters(), elementwise=mended)
    model(x()).sum().backward()
    optimizer.step()


@way("FS703", "Adam", "differentiable=True")
def _(mended: bool) -> None:
    model = build()
    flags = {} if mended else {"differentiable": True}
    optimizer = fsdp2.optim.local(torch.optim.Adam, model.parameters(), **flags)
    model(x()).sum().backward()
    optimizer.step()


class Scaled(torch.optim.SGD):
    """Keeps a scale for each column of a shard, which says nothing on other ranks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["scales"] = param.detach().amax(0) + 1.0


@way("FS704", "Scaled", "scales", "local_state")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer: Any = fsdp2.optim.local(Scaled, model.parameters(), lr=0.1, elementwise=True)
    model(x()).sum().backward()
    optimizer.step()
    if mended:
        state = checkpoint.local_state(model, optimizer)
        checkpoint.load_local_state(model, state, optimizer)
    else:
        optimizer.state_dict()


@way("FS705", "nan", "error_if_nonfinite")
def _(mended: bool) -> None:
    model = build()
    (model(x()).sum() * float("inf")).backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=not mended)


@way("FS708", "EMA.load_state_dict", "updates")
def _(mended: bool) -> None:
    model = build()
    average = fsdp2.optim.EMA(model)
    average.load_state_dict(average.state_dict() if mended else model.state_dict())


def first_step(model: nn.Module) -> None:
    """With the seed of all ranks."""
    model(x()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@way("FS709", "SGD", "2 of its parameters", "(4, 4)")
def _(mended: bool) -> None:
    model = Net()
    fsdp2.fully_shard(model[0])
    if mended:
        fsdp2.fully_shard(model)
    first_step(model)


@way("FS709", "1 of its parameters", "(4, 4)", name="a new layer")
def _(mended: bool) -> None:
    model = build()
    model[1] = nn.Linear(WIDTH, WIDTH, bias=False)
    if mended:
        fsdp2.fully_shard(model[1])
    first_step(model)


@way("FS709", "2 of its parameters", name="ignored")
def _(mended: bool) -> None:
    model = Net()
    ignored = set(model[1].parameters())
    if mended:
        fsdp2.fully_shard(model, ignored_params=ignored)
    else:
        fsdp2.fully_shard(model[0])
    first_step(model)


@way("FS710", "SGD", "0, 1", "accumulated without sync")
def _(mended: bool) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp2.no_sync(model):
        model(x()).sum().backward()
    if mended:
        model(x()).sum().backward()
    optimizer.step()


@way("FS711", "LBFGS", "all parameters together")
def _(mended: bool) -> None:
    model = build()
    cls = torch.optim.Adafactor if mended else torch.optim.LBFGS
    optimizer = fsdp2.optim.whole(cls, model.parameters())
    model(x()).sum().backward()
    optimizer.step()


class Assigns(torch.optim.SGD):
    """Puts other memory into a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data.clone()


@way("FS712", "Assigns", "replaced or resized")
def _(mended: bool) -> None:
    model = build()
    cls = torch.optim.SGD if mended else Assigns
    optimizer = fsdp2.optim.whole(cls, model.parameters(), lr=0.1)
    model(x()).sum().backward()
    optimizer.step()


@way("FS713", "cannot be pickled", "state_dict()")
def _(mended: bool) -> None:
    model = build()
    optimizer = fsdp2.optim.whole(torch.optim.Adafactor, model.parameters())
    model(x()).sum().backward()
    optimizer.step()
    if mended:
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        copy.deepcopy(optimizer)


class Adapts(torch.optim.SGD):
    """Keeps the norm of all parameters of a group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["norm"] = sum(float(param.detach().norm()) for param in group["params"])


@way("FS714", "Adapts", "norm of param group 0")
def _(mended: bool) -> None:
    model = build()
    cls = torch.optim.SGD if mended else Adapts
    optimizer = fsdp2.optim.whole(cls, model.parameters(), lr=0.1)
    model(x()).sum().backward()
    optimizer.step()


@way("FS715", "LBFGS", "closure")
def _(mended: bool) -> None:
    model = build()
    cls = torch.optim.SGD if mended else torch.optim.LBFGS
    fsdp2.optim.offload_states(cls(model.parameters(), lr=0.1))


@way("FS715", "owners", name="of whole matrices")
def _(mended: bool) -> None:
    model = build()
    make = fsdp2.optim.local if mended else fsdp2.optim.whole
    fsdp2.optim.offload_states(make(torch.optim.SGD, model.parameters(), lr=0.1))


@way("FS716", "Adapts", "by_itself")
def _(mended: bool) -> None:
    model = build()
    fsdp2.optim.offload_states(Adapts(model.parameters(), lr=0.1), by_itself=mended)


@way("FS717", "SGD", "replaced the step method")
def _(mended: bool) -> None:
    optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
    if mended:
        fsdp2.optim.offload_states(optimizer)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    fsdp2.optim.offload_states(optimizer)
