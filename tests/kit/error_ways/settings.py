"""Ways to the messages of ``fsdp2/_core/errors/settings.md``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import debug
from tests.kit import extensions
from tests.kit.error_ways._programs import Net, build, train, x
from tests.kit.error_ways._way import way


@way("FS501", "generte", "Generates")
def _(mended: bool) -> None:
    class Generates(Net):
        def generate(self, value: Tensor) -> Tensor:
            return self(value)  # type: ignore[no-any-return]

    model = fsdp2.fully_shard(Generates())
    fsdp2.register_fsdp_forward_method(model, "generate" if mended else "generte")
    model.generate(x())


@way("FS502", "generate", "generator")
def _(mended: bool) -> None:
    class Generates(Net):
        def generate(self) -> Any:
            yield self.one()

        def one(self) -> Tensor:
            return self[0].weight.sum()

    model = fsdp2.fully_shard(Generates())
    fsdp2.register_fsdp_forward_method(model, "one" if mended else "generate")
    next(model.generate())


@way("FS503", "Net", "fully_shard")
def _(mended: bool) -> None:
    model = Net()
    if mended:
        fsdp2.fully_shard(model)
    fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16))


@way("FS504", "bytes")
def _(mended: bool) -> None:
    model = build()
    model.set_memory(1_000_000 if mended else 70)
    train(model)


@way("FS505", "set_gradient_wire_dtype", "0")
def _(mended: bool) -> None:
    model = build()
    model.set_gradient_wire_dtype(torch.bfloat16)
    if mended:
        model.set_gradient_wire_dtype(None)
    fsdp2.register_comm_hook(model, fsdp2.Compress(torch.bfloat16))
    train(model)


@way("FS506", "set_gradient_divide_factor")
def _(mended: bool) -> None:
    model = build()
    if mended:
        model.set_gradient_divide_factor(2.0)
    else:
        model.set_reduce_scatter_divide_factor(2.0)
    train(model)


@way("FS507", "gloo", "NCCL")
def _(mended: bool) -> None:
    model = build()
    if not mended:
        model[0].set_symm_mem_for_comm()
    train(model)


@way("FS508", "Compress")
def _(mended: bool) -> None:
    model, compress = build(), fsdp2.Compress(torch.bfloat16)

    def hook(state: Any, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup) -> None:
        compress(state, packed, reduced if mended else reduced[:1], group)

    fsdp2.register_comm_hook(model, hook)
    train(model)


def of_class(kind: type[extensions.Bare], **kwargs: Any) -> Any:
    return extensions.shard(extensions.make((4,), kind), **kwargs)


def run(model: Any) -> None:
    model(torch.ones(2, extensions.WIDTH)).sum().backward()


class Weight(extensions.Int8Weight):
    """A right one, for the wrong ones to change."""


@way("FS509", "up", "fsdp_post_all_gather")
def _(mended: bool) -> None:
    class Half(extensions.Bare):
        fsdp_pre_all_gather = Weight.fsdp_pre_all_gather
        if mended:
            fsdp_post_all_gather = Weight.fsdp_post_all_gather

    run(of_class(Half))


@way("FS510", "up", "dim 0")
def _(mended: bool) -> None:
    run(of_class(Weight, shard_placement_fn=lambda p: None if mended or p.dim() == 1 else Shard(1)))


@way("FS511", "0.up", "was sharded with")
def _(mended: bool) -> None:
    """The methods are set on tensor objects, which `.double()` copies."""
    model = extensions.shard(extensions.make((4,), kind=None))
    extensions.set_methods(model[0].up)
    run(model)
    model.double()
    if mended:
        extensions.set_methods(model[0].up)
    model(torch.ones(2, extensions.WIDTH, dtype=torch.float64)).sum().backward()


@way("FS512", "0.up", "FS514", "takes 2 arguments")
def _(mended: bool) -> None:
    class Two(Weight):
        def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
            return (self.codes, self.scales), "metadata"

    run(of_class(Weight if mended else Two))


@way("FS512", "0.up", "FS514", "at most 16", name="too many")
def _(mended: bool) -> None:
    class Many(Weight):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (self.codes, self.scales) * (1 if mended else 9), "metadata"

    run(of_class(Many))


@way("FS513", "0.up", "fsdp_post_all_gather")
def _(mended: bool) -> None:
    class Alone(Weight):
        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
        ) -> Any:
            found = super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
            return found if mended or found is None else found[0]

    run(of_class(Alone))


@way("FS514", "0.up", "failed on rank 1")
def _(mended: bool) -> None:
    class Fails(Weight):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            if dist.get_rank() == 1 and not mended:
                raise ArithmeticError("no scale")
            return (self.codes, self.scales), "metadata"

    run(of_class(Fails))


@way("FS515", "without_communication")
def _(mended: bool) -> None:
    model = build()
    if mended:
        train(model)
        return
    with debug.without_communication(model):
        model(x())


@way("FS516", "reproducible", "2 data-parallel ranks for 1 slots")
def _(mended: bool) -> None:
    fsdp2.reproducible(build(), slots=2 if mended else 1)
