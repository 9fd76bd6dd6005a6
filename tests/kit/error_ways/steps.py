"""Ways to the messages of ``fsdp2/_core/errors/steps.md``."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import mse_loss

import fsdp2
from fsdp2 import checkpoint
from tests.kit.error_ways._programs import WIDTH, Net, build, train, x
from tests.kit.error_ways._way import way
from tests.kit.error_ways.compile import compiled
from tests.kit.meshes import DEVICE


@way("FS301", "full_state", "<root>", "forward")
def _(mended: bool) -> None:
    model = build()
    if not mended:
        model[1].register_forward_hook(lambda *_: checkpoint.full_state(model))
    model(x()).sum().backward()
    checkpoint.full_state(model)


@way("FS302", "1", "full_precision_in_eval")
def _(mended: bool) -> None:
    model = build(mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True))
    loss = model(x()).sum()
    if mended:
        loss.backward()
    model.eval()
    if not mended:
        loss.backward()


@way("FS303", "0", "set_manual_backward_finalization")
def _(mended: bool) -> None:
    model = build()
    (model if mended else model[0]).set_manual_backward_finalization(True)
    model(x()).sum().backward()
    model.finalize_backward()


@way("FS304", "0", "Net")
def _(mended: bool) -> None:
    model = build()
    for module in (model, model[0]) if mended else (model[0], model):
        module(x())


@way("FS305", "0", "conditional")
def _(mended: bool) -> None:
    model = Net()
    fsdp2.fully_shard(model[0], conditional=True)
    fsdp2.fully_shard(model)
    model(x())
    train(model)
    train(model if mended else model[0])


@way("FS306", "Net", "forward")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.summon_full_params(model):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        if not mended:
            model(x())
    other = Net()
    other.load_state_dict(weights)
    other(x())


@way("FS306", "compiled", "summon_full_params", name="compiled")
def _(mended: bool) -> None:
    model, fast = compiled()
    with fsdp2.summon_full_params(model):
        if not mended:
            fast(x())
    fast(x())


@way("FS307", "rank0_only")
def _(mended: bool) -> None:
    with fsdp2.summon_full_params(build(), rank0_only=True, writeback=not mended):
        pass


@way("FS308", "0.weight")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.summon_full_params(model), torch.no_grad():
        if mended:
            model[0].weight.fill_(1.0)
        else:
            model[0].weight = nn.Parameter(torch.ones(WIDTH + 1, WIDTH))
    train(model)


@way("FS309", "summon_full_params")
def _(mended: bool) -> None:
    model = build()
    given: dict[str, Any] = {"rank0_only": True, "writeback": False} if mended else {}
    with (
        warnings.catch_warnings(),
        mock.patch("torch.accelerator.is_available", return_value=True),  # it comes only there
    ):
        if mended:
            warnings.simplefilter("error")
        with fsdp2.summon_full_params(model, offload_to_cpu=True, **given):
            pass
    train(model)


@way("FS310", "set_manual_backward_finalization")
def _(mended: bool) -> None:
    model = build()
    model.set_manual_backward_finalization(mended)
    model(x()).sum().backward()
    model.finalize_backward()
    assert model[0].weight.grad is not None


@way("FS311", "wait()")
def _(mended: bool) -> None:
    model = build()
    model.set_manual_backward_finalization(True)
    model(x()).sum().backward()
    handle = model.finalize_backward(async_op=True)
    if mended:
        handle.wait()
    model(x())


@way("FS312", "0.weight", "requires_grad")
def _(mended: bool) -> None:
    model = build()
    with fsdp2.no_sync(model):
        model(x()).sum().backward()
    if mended:
        model(x()).sum().backward()
    model[0].requires_grad_(False)
    model(x()).sum().backward()


@way("FS314", "1.", "create_graph")
def _(mended: bool) -> None:
    model = build()
    value = x().requires_grad_()
    loss = model(value).square().sum()
    if mended:
        (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
        (loss + gradient.square().sum()).backward()
    else:
        loss.backward(create_graph=True)
    assert model[0].weight.grad is not None


@way("FS316", "0.weight", ".data")
def _(mended: bool) -> None:
    model, new = build(), torch.ones(WIDTH, WIDTH)
    if mended:
        model[0].weight = nn.Parameter(new)
        with fsdp2.summon_full_params(model), torch.no_grad():
            model[1].weight.copy_(new)
        with torch.no_grad():
            model[0].bias.mul_(0.5)
        assert torch.equal(model[0].weight.full_tensor(), new)
        assert torch.equal(model[1].weight.full_tensor(), new)
    else:
        model[0].weight.data = new
    train(model)


@way("FS317", "0.weight")
def _(mended: bool) -> None:
    model = build()
    rows = WIDTH if mended else WIDTH + 1
    model[0].weight = nn.Parameter(torch.ones(rows, WIDTH))
    train(model)


@way("FS318", "0.weight", "torch.func")
def _(mended: bool) -> None:
    model = build()

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (x(),)).sum()

    params: dict[str, Any] = dict(model.named_parameters())
    if mended:
        params = {name: p.full_tensor() for name, p in params.items()}
    torch.func.grad(loss)(params)


@way("FS318", "0.weight", "in its place", name="shape")
def _(mended: bool) -> None:
    model = build()
    params: dict[str, Any] = {name: p.full_tensor() for name, p in model.named_parameters()}
    if not mended:
        params["0.weight"] = torch.ones(WIDTH + 1, WIDTH)
    functional_call(model, params, (x(),))


@way("FS319", "0.weight", "its grad")
def _(mended: bool) -> None:
    model = build()
    model(x()).sum().backward()
    weight = model[0].weight
    wrong = torch.ones(1, WIDTH)  # another part of the rows than the parameter's
    weight.grad = DTensor.from_local(
        wrong, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    if mended:
        model.zero_grad()
    model(x()).sum().backward()


@way("FS320", "0.weight", "grad_dtype")
def _(mended: bool) -> None:
    model = Net()
    model[0].weight.grad_dtype = None
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32 if mended else None)
    fsdp2.fully_shard(model, mp_policy=policy)
    model.set_reduce_scatter_unused_params(True)
    train(model)


@way("FS315", "reshard_after_forward=False", on=(1,))
def _(mended: bool) -> None:
    """The first stage's inputs need no gradient, so its backward is not split."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("pipeline", "data"))
    part = Net()
    reshard = False if mended else None
    for module in (*part, part):
        fsdp2.fully_shard(module, mesh=mesh["data"], reshard_after_forward=reshard)
    rank, group = dist.get_rank(), mesh["pipeline"].get_group()
    stage = PipelineStage(part, rank, 2, torch.device(DEVICE), group=group)
    schedule = ScheduleInterleavedZeroBubble([stage], n_microbatches=2, loss_fn=mse_loss)
    try:
        schedule.step(*([] if rank else [x()]), **({"target": x()} if rank else {}))
    finally:
        dist.barrier()  # the error holds what is being sent, and the other stage has it now


class Keeps(nn.Module):
    """Leaves its loss where only a function of this class finds it."""

    kept: list[Tensor] = []  # noqa: RUF012  # that is the point

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).sum()
        Keeps.kept[:] = [loss]
        return loss


class Hides(Keeps):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]  # that is the point
        super().forward(x)


@way("FS321", "<root>", "Return the tensors")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Keeps() if mended else Hides())
    for _ in range(2):
        model(x())
        Keeps.kept.pop().backward()


@way("FS321", "<root>", "zero_grad", name="step")
def _(mended: bool) -> None:
    model = fsdp2.fully_shard(Keeps() if mended else Hides())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x())
    Keeps.kept.pop().backward()
    optimizer.step()


class Yields(Keeps):
    def forward(self, x: Tensor) -> Any:
        yield self.layer(x)


@way("FS322", "<root>", "generator", "Return a list")
def _(mended: bool) -> None:
    fsdp2.fully_shard(Keeps() if mended else Yields())(x())


class GivesItsWeight(Keeps):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, x: Tensor) -> Any:
        weight = self.layer.weight.clone() if self.copies else self.layer.weight
        return lambda: weight


@way("FS323", "layer", "clone()")
def _(mended: bool) -> None:
    model = nn.Module()
    model.layer = fsdp2.fully_shard(GivesItsWeight(mended))
    model.forward = lambda: model.layer(x())
    fsdp2.fully_shard(model)
    model()


class CallsACheckpoint(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x


@way("FS325", "Linear", "CheckpointWrapper")
def _(mended: bool) -> None:
    model = Net() if mended else CallsACheckpoint()
    fsdp2.offload_activations(model, {nn.Linear})
    model(x()).sum().backward()


@way("FS326", "first.0.weight", "got mixed", "register_fsdp_forward_method")
def _(mended: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, value: Tensor) -> Tensor:
            return self.second(self.first(value) if mended else self.first[0](value))

    model = Two()
    fsdp2.fully_shard(model.first)
    fsdp2.fully_shard(model)(torch.ones(2, 8))


@way("FS326", "attention.out_proj.weight", "mixed", name="attention", alone=True)
def _(mended: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 1)

        def forward(self, value: Tensor) -> Tensor:
            return self.attention(value, value, value)[0]  # type: ignore[no-any-return]

    model = Attends()
    unit = model.attention if mended else model.attention.out_proj
    fsdp2.plan(model, mesh=2, policy={type(unit)}, batch=x())


@way("FS327", "graphed", "no graphs")
def _(mended: bool) -> None:
    model = build()
    if mended:
        model(x()).sum().backward()
    else:
        fsdp2.graphed(model)


@way("FS329", "computed twice", "of 4")
def _(mended: bool) -> None:
    model = build()
    fsdp2.reproducible(model, slots=4)
    loss = model(x()).sum()
    if mended:
        (2 * loss).backward()
    else:
        loss.backward(retain_graph=True)
        loss.backward()


@way("FS330", "gradient sync was changed")
def _(mended: bool) -> None:
    model = build()
    fsdp2.reproducible(model, slots=4)
    if not mended:
        model.set_requires_gradient_sync(False)
    model(x()).sum().backward()
