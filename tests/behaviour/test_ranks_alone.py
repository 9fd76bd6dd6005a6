"""Promise: what one rank does alone (a copy, an error, a flag) is harmless, or an error everywhere.

Each case was found by a review to abort a process, to hang, or to mix what it should not.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fsdp2
from tests.kit.in_turn import shard_each
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks

WIDTH = 8


class Net(nn.Module):
    """Blocks of different sizes; raises where it is told to."""

    def __init__(self, hidden: tuple[int, ...] = (8, 13)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)) for size in hidden
        )
        self.head = nn.Linear(WIDTH, 3)
        self.raises_before: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate([*self.blocks, self.head]):
            if self.raises_before == index:
                raise ArithmeticError
            x = block(x)
        if self.raises_before == len(self.blocks) + 1:
            raise ArithmeticError
        return x


def build(hidden: tuple[int, ...] = (8, 13), **kwargs: object) -> Net:
    torch.manual_seed(0)
    model = Net(hidden)
    shard_each(*model.blocks, model, **kwargs)  # type: ignore[call-overload]  # any arguments
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    model.zero_grad()


@ranks(2)
def test_a_rank_that_failed_at_the_end_goes_on(rank: int) -> None:
    """Everything was issued on both ranks, so the next steps are in step."""
    model = build()
    for _ in range(3):
        step(model)
    model.raises_before = 3 if rank == 0 else None
    with torch.no_grad():
        try:
            model(torch.ones(2, WIDTH))
        except ArithmeticError:
            assert rank == 0
    model.raises_before = None
    for _ in range(2):
        step(model)


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("before", [1, 2])
@ranks(2)
def test_a_rank_that_failed_halfway_is_noticed_by_all(rank: int, before: int, warm: int) -> None:
    """It goes on with the next batch while the other is still in this one: an error on both."""
    model = build((8, 13, 8))
    for _ in range(warm):
        step(model)
    model.raises_before = before if rank == 0 else None
    with contextlib.suppress(ArithmeticError, fsdp2.StateError):
        step(model)
    model.raises_before = None
    with pytest.raises(fsdp2.StateError, match=r"rank 0: .*all-gather"):
        step(model)


@ranks(2)
def test_a_copy_on_one_rank_alone(rank: int) -> None:
    """A model that only one rank copies takes no number from those that all ranks run."""
    model = build()
    step(model)
    kept = copy.deepcopy(model) if rank == 0 else None
    other = build((13, 8))
    for _ in range(2):
        step(other)
        step(model)
    assert (kept is None) == (rank == 1)


@ranks(2)
def test_ranks_that_freeze_different_parameters(rank: int) -> None:
    """Buffers of equal sizes would pair another parameter's gradient with this one's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[rank].requires_grad_(False)
    fsdp2.fully_shard(model)
    trained = r"parameter set .*trainable.* Tensors on this rank: {0}.weight \({1}, {1}\), {0}.bias"
    with pytest.raises(fsdp2.StateError, match=trained.format(1 - rank, WIDTH)):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, runs: bool, uses: bool) -> Tensor:
        x = self.a(x)
        if runs:
            y = self.b(x)
            x = y if uses else x + 0 * y.detach()
        return self.head(x)


@ranks(2)
def test_freezing_while_only_another_rank_has_gradients(rank: int) -> None:
    """Refused by what all ranks know, so a rank without a gradient refuses too."""
    torch.manual_seed(0)
    model = Chooses()
    shard_each(model.a, model.b, model, reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, WIDTH), True, rank == 0).sum().backward()
    model.b.weight.requires_grad_(False)
    with pytest.raises(fsdp2.StateError, match="accumulated without sync"):
        model(torch.ones(2, WIDTH), True, True)


@ranks(2)
def test_gradients_that_only_one_rank_accumulated(rank: int) -> None:
    """A unit that ran on all ranks without sync is reduced by all in the step with sync."""
    torch.manual_seed(0)
    model = Chooses()
    reference = copy.deepcopy(model)
    shard_each(model.a, model.b, model)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model.set_requires_gradient_sync(False)
        model(x, True, rank == 0).sum().backward()
        model.set_requires_gradient_sync(True)
        model(x, False, False).sum().backward()
        for uses in (True, False):
            (reference(x, True, uses).sum() / 2).backward()
        reference(x, False, False).sum().backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        for parameter, expected in pairs:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
        model.zero_grad()
        reference.zero_grad()


@ranks(2)
def test_a_functional_call_that_raised_leaves_nothing() -> None:
    """Values that stood in for parameters are not met again by later forwards."""
    model = build()
    step(model)
    values = {name: p.detach() * 2 for name, p in model.named_parameters()}
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        expected = model(x)
    model.raises_before = 3
    with pytest.raises(ArithmeticError):
        functional_call(model, values, (x,))
    model.raises_before = None
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected)


@ranks(4)
def test_an_int_may_be_taken_back() -> None:
    """After `set_reshard_after_forward(True)` parameters wait over the whole axis again."""
    mesh = make_mesh(4)
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, reshard_after_forward=2)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    output = model(x)
    assert model.weight.device_mesh.size() == 4
    assert model.weight.device_mesh.ndim == 2
    del output
    model.reshard()
    model.set_reshard_after_forward(True)
    model(x).sum().backward()
    output = model(x)
    assert model.weight.device_mesh == mesh
    output.sum().backward()


@ranks(2)
def test_another_reduction_group_while_gradients_wait() -> None:
    """What was accumulated under another number is not taken for another rank's."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3)
    reference = copy.deepcopy(model)
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    fsdp2.fully_shard(model, mp_policy=policy)
    x = torch.ones(2, WIDTH)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_separate_reduce_scatter_group(True)
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    (2 * reference(x).sum()).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]


@ranks(2)
def test_the_state_is_there_after_ranks_diverged(rank: int) -> None:
    """Shards are whole after an undeclared divergence, for a checkpoint of what there is."""
    model = build((8, 8))
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    order = [0, 1] if rank == 0 else [1, 0]
    blocks = [model.blocks[index] for index in order]
    model.forward = lambda x: model.head(blocks[1](blocks[0](x)))  # type: ignore[method-assign]
    with pytest.raises(fsdp2.StateError):
        model(torch.ones(2, WIDTH))
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[name])
    with pytest.raises(fsdp2.StateError):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize("mixed", [False, True])
@ranks(2)
def test_what_torch_returns_from_topk_goes_through_a_unit(mixed: bool) -> None:
    """Named results of torch's functions are rebuilt as what they were."""

    class Top(nn.Linear):
        def forward(self, x: Tensor) -> object:  # type: ignore[override]  # not a tensor
            return torch.topk(super().forward(x), 2)

    policy = fsdp2.MixedPrecisionPolicy(output_dtype=torch.float64 if mixed else None)
    model = fsdp2.fully_shard(Top(WIDTH, 5), mp_policy=policy)
    found = model(torch.ones(2, WIDTH))
    assert type(found) is torch.return_types.topk
    assert found.values.dtype is (torch.float64 if mixed else torch.float32)
    found.values.sum().backward()
    assert model.weight.grad is not None
