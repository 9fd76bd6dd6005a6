"""Training side by side: a sharded model, an unsharded copy on the global batch, and torch's own.

Everything here runs on a rank. `Pair` is the one tool that most behaviour tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import shared_mesh
from tests.kit.models import CASES, Batch, Case, loss_of, seeded

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}
CARRIED_BY_GLOO = {*TOLERANCE, torch.int64, torch.int32, torch.uint8}
ROWS = 12  # of a global batch: 1, 2, 3 and 4 ranks divide it


def make_mesh(*shape: int) -> DeviceMesh:
    """Return a CPU mesh: one number shards, two replicate and shard; none means all ranks shard."""
    if len(shape) == 2:
        return shared_mesh(shape, ("replicate", "shard"))
    return shared_mesh(shape or (dist.get_world_size(),))


def replicas_of_four() -> DeviceMesh:
    """Return replicas of shards for four ranks, shards alone for fewer."""
    return make_mesh(2, 2) if dist.get_world_size() == 4 else make_mesh()


def shard(
    model: nn.Module,
    case: Case,
    library: Any = fsdp2,
    *,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Apply `library.fully_shard` to the case's units, then to the root."""
    mesh = mesh if mesh is not None else make_mesh()
    for unit in case.units(model):
        library.fully_shard(unit, mesh=mesh, **kwargs)
    library.fully_shard(model, mesh=mesh, **kwargs)
    return model


def sharded(case: Case | str, seed: int = 1, **kwargs: Any) -> Any:
    """Return a model of the case, sharded."""
    case = CASES[case] if isinstance(case, str) else case
    return shard(seeded(case.build, seed), case, **kwargs)


def backward_on(case: Case | str, *models: nn.Module) -> list[Tensor]:
    """Run forward and backward of models on this rank's part of a new batch; return the losses."""
    case = CASES[case] if isinstance(case, str) else case
    batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
    losses = [loss_of(model(*batch.args, **batch.kwargs)) for model in models]
    for loss in losses:
        loss.backward()
    return losses


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank, whatever its type and dtype."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if any(getattr(p, "deal", None) is not None for p in tensor.placements):
        return tensor.full_tensor()
    if _is_cut_in_chunks(tensor) and type(tensor.to_local()) is Tensor:
        return _join_chunks(tensor)
    if tensor.dtype in CARRIED_BY_GLOO:
        return tensor.full_tensor()
    local, shape, stride = tensor.to_local(), tensor.shape, tensor.stride()
    if tensor.dtype.is_complex:
        raw, shape = torch.view_as_real(local), torch.Size([*shape, 2])
        stride = torch.empty(shape, device="meta").stride()
    else:
        raw = local.view(torch.uint8) if tensor.dtype.itemsize == 1 else local.double()
    placed = DTensor.from_local(
        raw, tensor.device_mesh, tensor.placements, shape=shape, stride=stride
    )
    full = placed.full_tensor()
    if tensor.dtype.is_complex:
        return torch.view_as_complex(full.contiguous())
    return full.view(tensor.dtype) if tensor.dtype.itemsize == 1 else full.to(tensor.dtype)


def shard_owner(placement: Any) -> int | None:
    """Return the rank that has all rows; None: they are divided."""
    owner: int | None = getattr(getattr(placement, "deal", None), "owner", None)
    return owner


def _join_chunks(tensor: DTensor) -> Tensor:
    """Undo `torch.chunk` along each axis of the tensor's mesh, the innermost first.

    `full_tensor` plans its collectives anew for each shape, which costs more than to train.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    shape, cuts = tensor.shape, []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            rows = torch.empty(shape[placement.dim], 0).chunk(mesh.size(axis))
            sizes = [len(part) for part in rows] + [0] * (mesh.size(axis) - len(rows))
            shapes = [_with_size(shape, placement.dim, size) for size in sizes]
            cuts.append((mesh.get_group(axis), placement.dim, shapes))
            shape = shapes[coordinate[axis]]
    joined = tensor.to_local()
    assert joined.shape == shape, f"this rank holds {joined.shape}, not {shape}"
    for group, dim, shapes in reversed(cuts):
        joined = torch.cat(_gather(joined, shapes, group), dim)
    return joined


def _with_size(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size([*shape[:dim], size, *shape[dim % len(shape) + 1 :]])


def _gather(tensor: Tensor, shapes: list[torch.Size], group: dist.ProcessGroup) -> list[Tensor]:
    """Return each rank's tensor, by its bytes: gloo has not all dtypes, and wants equal sizes."""
    numels = [shape.numel() for shape in shapes]
    own = torch.zeros(max(numels) * tensor.dtype.itemsize, dtype=torch.uint8)
    own[: tensor.nbytes] = bits(tensor.cpu())
    received = [torch.empty_like(own) for _ in shapes]
    dist.all_gather(received, own, group=group)
    return [
        part.view(tensor.dtype)[:numel].view(shape)
        for part, numel, shape in zip(received, numels, shapes, strict=True)
    ]


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, for comparisons that tell NaNs and zeros apart."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_same(
    actual: Tensor, expected: Tensor, what: str, rtol: float | None = None, least: float = 0.0
) -> None:
    """Assert equality up to `rtol` of the largest element, or of `least`; else bit for bit.

    Of a `DTensor` each rank compares the part that it holds: to gather hundreds of parameters by
    `full_tensor` costs more than to train them.
    """
    expected = whole(expected).to(actual.device)  # of states some are on the host
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    largest = expected.abs().max().item() if _has_tolerance(expected) else 0.0
    if isinstance(actual, DTensor) and _is_cut_in_chunks(actual):
        expected = _part_of_this_rank(actual, expected)
        actual = actual.detach().to_local()
        assert actual.shape == expected.shape, (
            f"{what}: this rank holds {actual.shape}, not {expected.shape}"
        )
    actual = whole(actual)
    if expected.dtype not in TOLERANCE:
        assert torch.equal(bits(actual), bits(expected)), f"{what} differs"
        return
    rtol = TOLERANCE[expected.dtype] if rtol is None else rtol
    atol = rtol * max(least, largest)
    if torch.allclose(actual, expected, rtol=rtol, atol=atol):
        return  # `assert_close` takes ten times as long, and says more
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
    )


def _has_tolerance(expected: Tensor) -> bool:
    return expected.dtype in TOLERANCE and expected.numel() > 0


def _is_cut_in_chunks(tensor: DTensor) -> bool:
    return all(type(p) in (Shard, Replicate) for p in tensor.placements)


def _part_of_this_rank(tensor: DTensor, full: Tensor) -> Tensor:
    """Cut from `full` what `torch.chunk` gives this rank along each axis of the tensor's mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not on the tensor's mesh"
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            chunks = full.chunk(tensor.device_mesh.size(axis), placement.dim)
            index = coordinate[axis]
            full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, whole, by name."""
    return {name: whole(param).clone() for name, param in names_of(model).items()}


def assert_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Assert that parameters have these whole values, bit for bit."""
    params = names_of(model)
    for name, value in values.items():
        found = whole(params[name])
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(found), bits(value)), name


def assert_same_parameters(
    model: nn.Module, reference: nn.Module, rtol: float | None = None
) -> None:
    parameters, expected = names_of(model), names_of(reference)
    assert list(parameters) == list(expected)
    for name, parameter in expected.items():
        assert_same(parameters[name], parameter, name, rtol)


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, rtol: float | None = None
) -> None:
    """Assert that gradients exist for the same names and that all agree."""
    parameters, expected = names_of(model), names_of(reference)
    assert list(parameters) == list(expected)
    missing = [n for n, p in parameters.items() if (p.grad is None) != (expected[n].grad is None)]
    assert not missing, f"only one of the two models has a gradient for {missing}"
    least = _least_scale(p.grad for p in expected.values())
    for name, parameter in expected.items():
        if parameter.grad is not None:
            gradient = parameters[name].grad
            assert gradient is not None
            assert gradient.dtype == parameters[name].dtype, f"{name}.grad has {gradient.dtype}"
            assert_same(gradient, parameter.grad, f"{name}.grad", rtol, least)


def _least_scale(gradients: Iterable[Tensor | None]) -> float:
    """Return a fifth of the largest element: small gradients are sums that cancel."""
    largest = (g.abs().max().item() for g in gradients if g is not None and g.numel())
    return max(largest, default=0.0) / 5


def assert_sharded(model: nn.Module) -> None:
    """Assert that every parameter is a DTensor whose local part is its `torch.chunk` chunk."""
    for name, parameter in names_of(model).items():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"


def global_mean(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


class Losses(NamedTuple):
    """Of the sharded model on this rank's rows, and of the reference on the global batch."""

    own: Tensor
    reference: Tensor

    def backward(self, **kwargs: Any) -> None:
        for loss in self:
            loss.backward(**kwargs)


class Pair:
    """A sharded model, and an unsharded copy that is trained on the global batch."""

    def __init__(
        self,
        case: Case | str,
        *,
        library: Any = fsdp2,
        optimizer: Callable[..., torch.optim.Optimizer] = LocalSGD,
        prepare: Callable[[nn.Module], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.case = CASES[case] if isinstance(case, str) else case
        self.reference = seeded(self.case.build)
        self.model = seeded(self.case.build)
        if prepare is not None:
            prepare(self.reference)
            prepare(self.model)
        shard(self.model, self.case, library, **kwargs)
        self.call: Callable[..., Any] | None = None  # what runs in the place of the sharded model
        dtypes = {p.dtype for p in self.reference.parameters() if p.requires_grad}
        coarsest = max((TOLERANCE[dtype] for dtype in dtypes), default=0.0)
        count = dist.get_world_size()
        # The reference divides before backward and the reduction after it: exact for powers of two.
        self.first_rtol = None if count & (count - 1) == 0 else 4 * coarsest
        # After a step the roundings of the coarsest dtype have reached the others.
        self.later_rtol = coarsest if self.first_rtol is None else self.first_rtol
        self.steps = 0
        self.make_optimizer = optimizer
        self.optimizer, self.reference_optimizer = self._optimizers()

    def _optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return tuple(  # type: ignore[return-value]  # a pair
            self.make_optimizer([p for p in m.parameters() if p.requires_grad], lr=0.1)
            for m in (self.model, self.reference)
        )

    @property
    def rtol(self) -> float | None:
        """The tolerance of the next comparison; None is that of each dtype."""
        return self.later_rtol if self.steps else self.first_rtol

    def batch(self) -> Batch:
        """Return a new global batch, the same on every rank."""
        return self.case.batch(ROWS)

    def local(self, batch: Batch) -> Batch:
        return batch.chunk(dist.get_rank(), dist.get_world_size())

    def each(self) -> list[tuple[nn.Module, Batch]]:
        """Return both models, and what each gets of a new batch."""
        batch = self.batch()
        return [(self.model, self.local(batch)), (self.reference, batch)]

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        call = self.call if model is self.model and self.call is not None else model
        return loss_of(call(*batch.args, **batch.kwargs))

    def run_reference(self, batch: Batch) -> Tensor:
        """Run the reference on the global batch, in the ranks' parts: fp32 rounds alike."""
        count = dist.get_world_size()
        parts = [self.run(self.reference, batch.chunk(index, count)) for index in range(count)]
        return torch.stack(parts).mean()

    def losses(self, batch: Batch | None = None) -> Losses:
        """Run both forwards on a batch, or a new one, and compare the losses."""
        batch = self.batch() if batch is None else batch
        losses = Losses(self.run(self.model, self.local(batch)), self.run_reference(batch))
        assert_same(global_mean(losses.own), losses.reference, "loss", self.rtol)
        return losses

    def backward(self, batch: Batch | None = None, scale: float = 1.0) -> None:
        """Run forward and backward of both and compare the losses."""
        for loss in self.losses(self.batch() if batch is None else batch):
            (loss * scale).backward()

    def accumulate(
        self, count: int = 2, setting: str = "set_requires_gradient_sync", scale: float = 1.0
    ) -> None:
        """Run several backwards of both; the setting is true for the last of them alone."""
        for micro in range(count):
            getattr(self.model, setting)(micro == count - 1)
            self.backward(scale=scale)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.reference_optimizer.zero_grad()

    def step(self) -> None:
        """Compare the gradients, step both optimizers and clear the gradients."""
        assert_same_gradients(self.model, self.reference, self.rtol)
        self.steps += 1
        for optimizer in (self.optimizer, self.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def finish(self) -> None:
        """Step, and compare the parameters."""
        self.step()
        self.check()

    def train(self, steps: int = 3) -> None:
        """Train both and compare losses, gradients and, in the end, parameters."""
        before = {name: whole(p).clone() for name, p in names_of(self.reference).items()}
        for _ in range(steps):
            self.backward()
            self.step()
        assert any(not torch.equal(p, before[n]) for n, p in names_of(self.reference).items())
        self.check()

    def train_on_sums(self) -> None:
        """Train both on losses of two forwards each, which are differentiated at once."""
        for _ in range(2):
            for first, second in zip(self.losses(), self.losses(), strict=True):
                (first + 2 * second).backward()
            self.step()
        self.check()

    def check(self) -> None:
        assert_sharded(self.model)
        assert_same_parameters(self.model, self.reference, self.rtol)


def local_loss(model: nn.Module, case: Case) -> Tensor:
    """Return the loss of this rank's part of a new batch."""
    batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
    return loss_of(model(*batch.args, **batch.kwargs))


def train_alike(case: Case, steps: int = 3, **kwargs: Any) -> None:
    """Train the same seeds under this package and under torch's own, and compare everything."""
    ours = shard(seeded(case.build), case, fsdp2, **kwargs)
    theirs = shard(seeded(case.build), case, torch_fsdp, **_in_torch(kwargs))
    optimizers = [
        LocalSGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for m in (ours, theirs)
    ]
    for _ in range(steps):
        batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
        losses = [loss_of(m(*batch.args, **batch.kwargs)) for m in (ours, theirs)]
        assert_same(losses[0], losses[1], "loss")
        for loss in losses:
            loss.backward()
        assert_same_shards(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(ours, theirs)


def _in_torch(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate a policy of ours into torch's."""
    policy = kwargs.get("mp_policy")
    if policy is None:
        return kwargs
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    return kwargs | {
        "mp_policy": torch_fsdp.MixedPrecisionPolicy(**{n: getattr(policy, n) for n in names})
    }


def assert_same_shards(ours: nn.Module, theirs: nn.Module) -> None:
    """Assert that gradients of two sharded models lie alike, and that each rank's part agrees."""
    expected = names_of(theirs)
    locals_ = [p.grad.to_local() for p in expected.values() if isinstance(p.grad, DTensor)]
    least = _least_scale(locals_)
    for name, parameter in names_of(ours).items():
        gradient, other = parameter.grad, expected[name].grad
        assert (gradient is None) == (other is None), f"{name}: only one has a gradient"
        if isinstance(gradient, DTensor) and isinstance(other, DTensor):
            assert gradient.placements == other.placements, name
            assert_same(gradient.to_local(), other.to_local(), f"{name}.grad", None, least)
