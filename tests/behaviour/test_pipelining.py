"""Units as stages of `torch.distributed.pipelining`, with its stock schedules.

The reference is the whole model in one piece: it sees the global batch, and nothing of it is
sharded. A step of a pipeline must leave the same loss and the same gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
    schedules,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleLoopedBFS

import fsdp2
from fsdp2._core.base.events import Event, listen
from tests.kit.in_turn import advance, shard_each
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import DEVICE
from tests.kit.models import TORCH_2_13, TORCH_2_15, WIDTH, Block, seeded
from tests.kit.parity import assert_same, assert_sharded
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow

CPU = torch.device("cpu")
MICROBATCHES = 4
PER_MICROBATCH = 2
RTOL = 1e-6  # of the largest element: the microbatches are summed in another order


class Part(nn.Module):
    """What one stage runs: layers, and a parameter of the stage's root around them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build(stages: int, layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*[Part(layers) for _ in range(stages)])


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.to(target.dtype), target)  # torch 2.11 does not promote


def looped(rank: int, size: int, stages: int) -> list[int]:
    return list(range(rank, stages, size))


def v_shaped(rank: int, size: int, stages: int) -> list[int]:
    return [rank, stages - 1 - rank]


class FinalizingStage(PipelineStage):
    """Asks for its reduction as torch 2.15's stages do, whichever torch is installed."""

    submod: fsdp2.FSDPModule

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.set_manual_backward_finalization(True)
        return super().forward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_reshard_after_backward(True)
        handle = self.submod.finalize_backward(async_op=True)
        assert isinstance(handle, fsdp2.GradientReductionHandle)
        handle.wait()
        self.submod.set_manual_backward_finalization(False)
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)


class CallingBackStage(PipelineStage):
    """Asks for its reduction as stages did up to torch 2.14, whichever torch is installed."""

    submod: fsdp2.FSDPModule

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.__dict__["set_manual_backward_finalization"] = lambda enabled: None
        try:
            return super().forward_one_chunk(*args, **kwargs)
        finally:
            del self.submod.__dict__["set_manual_backward_finalization"]

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.set_is_last_backward(False)
        return super().backward_maybe_with_nosync(*args, **kwargs)

    def start_gradient_reduction(self) -> None:
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        state = torch.distributed.fsdp.fully_shard.state(self.submod)  # type: ignore[attr-defined]
        for unit in state._state_ctx.all_states:
            for group in unit._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.start_gradient_reduction()
        self.wait_for_gradient_reduction(grad_scale_factor)


OTHER_CONTRACT = CallingBackStage if TORCH_2_15 else FinalizingStage
"""A stage that asks for reductions as the installed torch's own do not."""


class Pipelined:
    """The stages of this rank, sharded, in a schedule; and the whole model to compare with."""

    def __init__(
        self,
        schedule: Callable[..., Any],
        mesh: DeviceMesh,
        *,
        stages: int = 2,
        placed: Callable[[int, int, int], list[int]] = looped,
        static: bool = False,
        mixed: fsdp2.MixedPrecisionPolicy = fsdp2.MixedPrecisionPolicy(),  # noqa: B008  # frozen
        scale_grads: bool = True,
        root: bool = True,
        reshard: bool | None = False,
        data: DeviceMesh | None = None,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
        dtype: torch.dtype = torch.float32,
        stage: type[PipelineStage] = PipelineStage,
        **options: Any,
    ) -> None:
        self.reference, model = (seeded(lambda: build(stages)).to(dtype) for _ in range(2))
        self.dtype = dtype
        prepare(self.reference)
        prepare(model)
        self.pp, self.dp = mesh["pp"], mesh["dp"]
        rank, size = self.pp.get_local_rank(), self.pp.size()
        self.parts: dict[int, nn.Module] = {}
        self.pieces: list[PipelineStage] = []
        example = torch.zeros(PER_MICROBATCH, WIDTH, dtype=dtype)
        for index in placed(rank, size, stages):
            part = model[index]
            kwargs: dict[str, Any] = {"mesh": data or self.dp, "mp_policy": mixed}
            shard_each(*part.layers, reshard_after_forward=reshard, **kwargs)  # type: ignore[union-attr]  # a ModuleList
            if root:
                fsdp2.fully_shard(part, reshard_after_forward=reshard, **kwargs)
            self.parts[index] = part
            given = {}
            if static:
                given = {"input_args": (example,), "output_args": (example,)}
                if index:
                    given["input_args"] = (example.clone().requires_grad_(),)
                given["output_args"] = (example.clone().requires_grad_(),)
            self.pieces.append(stage(part, index, stages, CPU, group=self.pp.get_group(), **given))
        self.stages = stages
        one = schedule in (ScheduleGPipe, Schedule1F1B)
        self.schedule = schedule(
            self.pieces[0] if one else self.pieces,
            n_microbatches=MICROBATCHES,
            loss_fn=mse,
            scale_grads=scale_grads,
            **options,
        )
        self.optimizers = [
            kind(m.parameters(), lr=0.1, momentum=0.9)
            for kind, m in (
                (LocalSGD, nn.ModuleList(self.parts.values())),
                (torch.optim.SGD, self.reference),
            )
        ]

    @property
    def is_first(self) -> bool:
        return 0 in self.parts

    @property
    def is_last(self) -> bool:
        return self.stages - 1 in self.parts

    def batch(self) -> tuple[Tensor, ...]:
        """Return a global batch and targets, the same on every rank."""
        rows = MICROBATCHES * PER_MICROBATCH * self.dp.size()
        return torch.randn(2, rows, WIDTH, dtype=self.dtype).unbind()

    def run(
        self,
        rtol: float = RTOL,
        scale: float = 1.0,
        through: Callable[..., Any] | None = None,
        finalizes: bool = True,
    ) -> None:
        """Run forward and backward of both, and compare losses and gradients.

        `through`: another method of the schedule (`eval`), which computes no gradients.
        `finalizes`: the step reduces them.
        """
        x, y = self.batch()
        expected = mse(self.reference(x), y)
        if through is None:
            (expected * scale).backward()
        losses = self.call(
            through or self.schedule.step,
            x,
            y,
            **({} if finalizes else {"finalize_gradients": False}),
        )
        if self.is_last:
            loss = torch.stack([loss.detach() for loss in losses]).mean()
            dist.all_reduce(loss, group=self.dp.get_group())
            assert_same(loss / self.dp.size(), expected.detach(), "loss", rtol)
        if through is None and finalizes:
            self.check_gradients(rtol)

    def call(self, method: Callable[..., Any], x: Tensor, y: Tensor, **kwargs: Any) -> list[Tensor]:
        """Call a method of the schedule on this rank's rows; return the losses of microbatches."""
        rank, size = self.dp.get_local_rank(), self.dp.size()
        args = (x.chunk(size)[rank],) if self.is_first else ()
        losses: list[Tensor] = []
        if self.is_last:
            kwargs |= {"target": y.chunk(size)[rank], "losses": losses}
        method(*args, **kwargs)
        return losses

    def check_gradients(self, rtol: float = RTOL) -> None:
        for index, part in self.parts.items():
            expected = dict(self.reference[index].named_parameters())
            assert [n for n, _ in part.named_parameters()] == list(expected)
            least = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
            for name, parameter in part.named_parameters():
                wanted = expected[name].grad
                assert (parameter.grad is None) is (wanted is None), f"stage {index}: {name}.grad"
                if parameter.grad is None or wanted is None:
                    assert not parameter.requires_grad
                    continue
                assert_same(parameter.grad, wanted, f"stage {index}: {name}.grad", rtol, least)

    def step(self) -> None:
        advance(*self.optimizers)

    def train(self, steps: int = 3, rtol: float = RTOL) -> None:
        for _ in range(steps):
            self.run(rtol)
            self.step()
        for index, part in self.parts.items():
            for name, wanted in self.reference[index].named_parameters():
                assert_same(part.get_parameter(name), wanted, f"stage {index}: {name}", 4 * rtol)


def grid(pp: int) -> DeviceMesh:
    dp = dist.get_world_size() // pp
    return init_device_mesh(DEVICE, (pp, dp), mesh_dim_names=("pp", "dp"))


SEVERAL = {
    "looped-bfs": (ScheduleLoopedBFS, looped),
    "interleaved": (ScheduleInterleaved1F1B, looped),
    "zero-bubble": (ScheduleInterleavedZeroBubble, looped),
    "zbv": (ScheduleZBVZeroBubble, v_shaped),
    "dual-pipe": (ScheduleDualPipeV, v_shaped),
}


@pytest.mark.parametrize("stage", [PipelineStage, OTHER_CONTRACT])
@pytest.mark.parametrize("schedule", with_slow([ScheduleGPipe, Schedule1F1B], [Schedule1F1B]))
@ranks(2, slow(4))
def test_one_stage_a_rank(schedule: Any, stage: Any) -> None:
    """Stages of a pipeline may be sharded: losses, gradients and weights are the plain model's.

    Stages ask for their reduction in two ways: up to torch 2.14, and since.
    """
    Pipelined(schedule, grid(2), stage=stage).train()


# Torch 2.11 itself cannot: it sends to its own rank, which gloo does not do, and it cannot train
# after an evaluation.
NEEDS_2_13 = pytest.mark.skipif(not TORCH_2_13, reason="the schedule needs torch 2.13")

V_SHAPED = [n for n, (_, placed) in SEVERAL.items() if placed is v_shaped]
IN_DEFAULT = ["zero-bubble"]
NAMES = [
    pytest.param(
        name,
        marks=[
            *([NEEDS_2_13] if name in V_SHAPED else []),
            *([pytest.mark.slow] if name not in IN_DEFAULT else []),
        ],
    )
    for name in SEVERAL
]


def several(name: str, pp: int = 2, **options: Any) -> Pipelined:
    """Return two stages a rank in a schedule of `SEVERAL`."""
    schedule, placed = SEVERAL[name]
    return Pipelined(schedule, grid(pp), stages=2 * pp, placed=placed, **options)


@pytest.mark.parametrize("stage", [PipelineStage, OTHER_CONTRACT])
@pytest.mark.parametrize("name", NAMES)
@ranks(4)
def test_several_stages_a_rank(name: str, stage: Any) -> None:
    """Schedules that unshard, reshard and reduce by themselves, and split backward, work too."""
    several(name, stage=stage).train()


@pytest.mark.skipif(not TORCH_2_15, reason="torch's schedules have these since 2.15")
@products([("interleaved", True)], name=["interleaved", "zero-bubble"], defers=[False, True])
@ranks(4)
def test_steps_that_are_finalized_later(name: str, defers: bool) -> None:
    """`step(finalize_gradients=False)` leaves stages whole, and the next one adds to its sums."""
    options = {"defer_reduce_grad_wait": True} if defers else {}
    run = several(name, scale_grads=False, **options)
    for _ in range(2):
        run.run(scale=MICROBATCHES, finalizes=False)
        gathered: list[Event] = []
        with listen(gathered.append):
            run.run(scale=MICROBATCHES)
        assert "unshard" not in {event.kind for event in gathered}
        run.step()


@pytest.mark.skipif(not TORCH_2_15, reason="torch's schedules have these since 2.15")
@ranks(4)
def test_waits_are_not_deferred_where_stages_share_their_streams() -> None:
    """Torch compares what two stages call their communication context."""
    run = several("interleaved", defer_reduce_grad_wait=True)
    fsdp2.share_comm_ctx(list(run.parts.values()))
    with pytest.raises(ValueError, match="share a communication context"):
        ScheduleInterleaved1F1B(run.pieces, MICROBATCHES, loss_fn=mse, defer_reduce_grad_wait=True)


@pytest.mark.parametrize("name", with_slow(["interleaved", "zero-bubble"], ["interleaved"]))
@ranks(4)
def test_shapes_given_by_the_user(name: str) -> None:
    """Without a trial run for shapes, the schedule may unshard before any forward ran."""
    several(name, static=True).train()


@products([(Schedule1F1B, True)], schedule=[ScheduleGPipe, Schedule1F1B], reshard=[None, True])
@ranks(4)
def test_parameters_freed_after_each_forward(schedule: Any, reshard: bool | None) -> None:
    """Units of a stage may free their parameters between the microbatches."""
    Pipelined(schedule, grid(2), reshard=reshard).train(steps=2)


@contextmanager
def sends_that_arrive() -> Iterator[None]:
    """A schedule that raises drops what it is sending, and the other stage would wait for it."""
    works: list[Any] = []
    issue = schedules._batch_p2p

    def keep(*args: Any, **kwargs: Any) -> Any:
        issued = issue(*args, **kwargs)
        works.append(issued)
        return issued

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_batch_p2p", keep)
        yield
    dist.barrier()  # the other stage has all once it is here, too
    assert works


@pytest.mark.parametrize(
    ("dtype", "frees"), [(None, "all"), (torch.bfloat16, "all"), (None, "one")]
)
@ranks(2)
def test_zero_bubble_needs_the_parameters_kept(dtype: torch.dtype | None, frees: str) -> None:
    """A schedule that would lose gradients of freed parameters ends in an error, not in silence.

    The error does not wait for a second unit that lost its gradient.
    """
    mixed = fsdp2.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    reshard = None if frees == "all" else False
    run = Pipelined(ScheduleInterleavedZeroBubble, grid(2), reshard=reshard, mixed=mixed)
    if run.is_first:  # its inputs need no gradient, so its backward is not split
        run.call(run.schedule.step, *run.batch())
        dist.barrier()
        assert [n for n, p in run.parts[0].named_parameters() if p.grad is None] == []
        return
    message = r"layers\.0: found no gradient .*forward=False"
    if frees == "one":
        run.parts[1].layers[1].set_reshard_after_forward(True)  # type: ignore[index,union-attr]
        message = r"layers\.1: found no gradient .* \(affected units in this stage: 1\)"
    with sends_that_arrive(), pytest.raises(fsdp2.StateError, match=message):
        run.call(run.schedule.step, *run.batch())


@ranks(4)
def test_only_the_layers_of_a_stage_are_sharded() -> None:
    """If the stage itself is no unit, its layers reduce after each microbatch."""

    def plain_grads_too(run: Pipelined) -> None:
        """Average what nobody shards; a plain stage is the user's to reduce."""
        for part in run.parts.values():
            for parameter in part.out.parameters():  # type: ignore[union-attr]  # a Linear
                dist.all_reduce(parameter.grad, group=run.dp.get_group())
                parameter.grad /= run.dp.size()

    run = Pipelined(Schedule1F1B, grid(2), root=False)
    check, run.check_gradients = run.check_gradients, lambda rtol: None  # type: ignore[method-assign]  # later
    for _ in range(2):
        run.run()
        plain_grads_too(run)
        check()
        run.step()


@pytest.mark.parametrize("name", with_slow(["interleaved", "zero-bubble"], ["zero-bubble"]))
@ranks(4)
def test_mixed_precision(name: str) -> None:
    """In bfloat16, gradients of microbatches are exact sums in the reduce dtype, float32."""
    mixed = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = several(name, mixed=mixed)
    for part in run.parts.values():
        part.set_requires_gradient_sync(False)  # the trial run for shapes must leave nothing either
    x, y = run.batch()
    low = copy.deepcopy(run.reference).bfloat16()
    for wanted in run.reference.parameters():
        wanted.grad = torch.zeros_like(wanted)
    parts = MICROBATCHES * run.dp.size()
    for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        mse(low(inputs.bfloat16()), targets).backward()
        for wanted, parameter in zip(run.reference.parameters(), low.parameters(), strict=True):
            wanted.grad += parameter.grad.float() / parts
            parameter.grad = None
    run.call(run.schedule.step, x, y)
    run.check_gradients()


@ranks(4)
def test_replicated_stages() -> None:
    """A stage may be sharded over one axis and replicated over another."""
    names = ("pp", "dp", "shard")
    mesh = init_device_mesh(DEVICE, (2, 2, 1), mesh_dim_names=names)
    Pipelined(Schedule1F1B, mesh, data=mesh["dp", "shard"]).train(steps=2)


def freeze_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)


@pytest.mark.parametrize("name", with_slow(["interleaved", "zero-bubble"], ["interleaved"]))
@ranks(4)
def test_frozen_parameters(name: str) -> None:
    """Frozen parameters of a stage get no gradient, and the others theirs."""
    several(name, prepare=freeze_norms).train(steps=2)


@ranks(4)
def test_gradients_add_up_over_schedules() -> None:
    """Two schedules before an optimizer step give the sum of their gradients, unscaled as asked."""
    run = Pipelined(Schedule1F1B, grid(2), scale_grads=False)
    for _ in range(2):
        run.run(scale=MICROBATCHES)
        run.run(scale=MICROBATCHES)
        run.step()


@NEEDS_2_13
@pytest.mark.parametrize(
    "schedule", with_slow([ScheduleGPipe, ScheduleInterleaved1F1B], [ScheduleInterleaved1F1B])
)
@ranks(4)
def test_evaluation_between_steps(schedule: Any) -> None:
    """Evaluation before, between and after steps changes nothing, also by its trial runs."""
    run = Pipelined(schedule, grid(2), reshard=None)
    for _ in range(2):
        run.run(through=run.schedule.eval)
        for stage in run.pieces:  # torch 2.15: else graphs live on
            stage.clear_runtime_states()
        for part in run.parts.values():
            assert_sharded(part)
            assert [n for n, p in part.named_parameters() if p.grad is not None] == []
        run.run()
        run.step()
    run.run(through=run.schedule.eval)


@pytest.mark.parametrize("name", with_slow(["1f1b", "interleaved", "zero-bubble"], ["zero-bubble"]))
@ranks(4)
def test_what_a_step_communicates(name: str) -> None:
    """A step gathers each unit once and reduces it once, whatever the number of microbatches."""
    run = Pipelined(Schedule1F1B, grid(2)) if name == "1f1b" else several(name)
    run.run()
    run.step()
    events: list[Event] = []
    with listen(events.append):
        run.run()
    stages = 1 if name == "1f1b" else 2
    units = sorted(["", "layers.0", "layers.1"] * stages)
    assert sorted(e.fqn for e in events if e.kind == "unshard") == units
    assert sorted(e.fqn for e in events if e.kind == "reduce") == units
    assert sum(e.kind == "wait_for_reduce" for e in events) == stages
    for part in run.parts.values():
        assert_sharded(part)


@ranks(4)
def test_the_tracing_front_end() -> None:
    """Stages that `pipeline(...)` cuts out of a traced model may be sharded as well."""
    mesh = grid(2)
    reference, model = seeded(lambda: build(2)), seeded(lambda: build(2))
    example = torch.zeros(PER_MICROBATCH, WIDTH)
    pipe = pipeline(model, (example,), split_spec={"1": SplitPoint.BEGINNING})
    index = mesh["pp"].get_local_rank()
    part = pipe.get_stage_module(index)
    fsdp2.fully_shard(part, mesh=mesh["dp"])
    assert isinstance(part, fsdp2.FSDPModule)
    schedule = Schedule1F1B(
        pipe.build_stage(index, CPU, mesh["pp"].get_group()), MICROBATCHES, loss_fn=mse
    )
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for _ in range(2):
        rows = MICROBATCHES * PER_MICROBATCH * size
        x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        mse(reference(x), y).backward()
        if index == 0:
            schedule.step(x.chunk(size)[rank])
        else:
            schedule.step(target=y.chunk(size)[rank])
        wanted = dict(reference.named_parameters())
        least = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
        checked = 0
        for name, parameter in part.named_parameters():
            expected = wanted[name]
            assert_same(parameter.grad, expected.grad, f"{name}.grad", RTOL, least)
            checked += 1
        assert checked == 18
        for m in (part, reference):
            m.zero_grad()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("reshard", [True, False])
@ranks(slow(4))
def test_four_stages_in_a_row(schedule: Any, static: bool, reshard: bool) -> None:
    """Four stages of one rank each: sharding over one rank changes nothing."""
    Pipelined(schedule, grid(4), stages=4, static=static, reshard=reshard).train()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", [n for n in NAMES if "dual-pipe" not in n.values])
@ranks(slow(4))
def test_eight_stages_on_four_ranks(name: str, static: bool) -> None:
    """Two stages a rank on four ranks; in float64, which shows that the rest is rounding."""
    several(name, pp=4, static=static, dtype=torch.float64).train(rtol=1e-13)


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved"])
@pytest.mark.parametrize("reshard", [None, True])
@ranks(slow(4))
def test_several_stages_that_free_their_parameters(name: str, reshard: bool | None) -> None:
    """Schedules with whole backwards need no parameters kept after forward."""
    several(name, reshard=reshard).train()
