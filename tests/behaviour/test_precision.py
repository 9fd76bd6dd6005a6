"""Promise: what FSDP1's `MixedPrecision` did beyond dtypes of a step, a policy does here.

Also what `ignored_states` leaves alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy, checkpoint
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import CASES, Stack, loss_of, seeded
from tests.kit.parity import assert_same, make_mesh, shard, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

BF16, FP32 = torch.bfloat16, torch.float32


class WithBuffers(nn.Module):
    """A table that nobody writes to, statistics that a forward writes to, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.norm = nn.BatchNorm1d(29)
        self.register_buffer("table", torch.randn(29))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.dtype, self.up.weight.dtype, self.table.dtype, self.unsaved.dtype]
        return self.norm(self.up(x)) + self.table


@ranks(2)
def test_buffers_are_restored_in_state_dicts() -> None:
    """In the module bf16, in its state dict fp32: exact where nobody wrote, and so on loading."""
    original = seeded(WithBuffers)
    model = copy.deepcopy(original)
    policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16)
    fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy)
    for model_ in (model, copy.deepcopy(model)):
        assert {b.dtype for b in model_.buffers()} == {BF16, torch.int64}
        state = model_.state_dict()
        assert "unsaved" not in state
        assert torch.equal(state["table"], original.table)
        assert state["norm.running_mean"].dtype is FP32
        model_(torch.randn(4, 13, dtype=BF16))
        assert model_.seen[2:] == [BF16, BF16]
        state = model_.state_dict()
        assert torch.equal(state["table"], original.table)
        mean = model_.norm.running_mean
        assert mean.dtype is BF16
        assert mean.abs().sum() > 0
        assert torch.equal(state["norm.running_mean"], mean.float())
        late = copy.deepcopy(model_).state_dict()
        assert torch.equal(late["norm.running_mean"], mean.float())
        assert torch.equal(late["table"], original.table)
        loaded = {k: v.clone() for k, v in state.items()}
        loaded["table"] = torch.randn(29)
        for assign in (False, True):
            model_.load_state_dict(loaded, assign=assign)
            assert model_.table.dtype is BF16
            assert torch.equal(model_.table, loaded["table"].bfloat16())
            assert torch.equal(model_.state_dict()["table"], loaded["table"])
        model_.to(torch.device("cpu"))


@pytest.mark.parametrize("form", ["full", "files", "local", "plain"])
@ranks(2)
def test_buffers_are_filled_by_every_load(tmp_path: Path, form: str) -> None:
    """In fp32 where nobody wrote since, and cast; in evaluation in full precision."""
    policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16, full_precision_in_eval=True)
    saved, model = seeded(WithBuffers, 1), seeded(WithBuffers, 2)
    saved.norm.running_mean.uniform_()
    shard_each(saved, model, mesh=make_mesh(), mp_policy=policy)
    state = saved.state_dict()
    for mode in (True, False):
        if form == "full":
            full = checkpoint.full_state(saved, rank0_only=False)
            checkpoint.load_full_state(model, full)
        elif form == "files":
            checkpoint.save(tmp_path / "step", saved)
            checkpoint.load(tmp_path / "step", model)
        elif form == "local":
            checkpoint.load_local_state(model, checkpoint.local_state(saved))
        else:
            model.load_state_dict(state)
        dtype = BF16 if mode else FP32
        for name in ("table", "norm.running_mean"):
            found = dict(model.named_buffers())[name]
            assert found.dtype is dtype
            assert torch.equal(found, state[name].to(dtype)), name
            assert torch.equal(model.state_dict()[name], state[name]), name
        model.eval()
        for buffer in model.buffers():
            buffer.zero_()


@ranks(2)
def test_buffers_as_torch_casts_them() -> None:
    """The same dtypes inside of a forward as under FSDP1."""
    theirs_policy = MixedPrecision(BF16, FP32, BF16)
    theirs = FullyShardedDataParallel(
        seeded(WithBuffers), mixed_precision=theirs_policy, device_id=torch.device("cpu"),
        use_orig_params=True,
    )  # fmt: skip
    ours = seeded(WithBuffers)
    policy = MixedPrecisionPolicy(
        BF16, FP32, cast_forward_inputs=False, cast_root_forward_inputs=True, buffer_dtype=BF16
    )
    fsdp2.fully_shard(ours, mesh=make_mesh(), mp_policy=policy)
    x = torch.randn(4, 13)
    outputs = [m(x) for m in (theirs, ours)]
    assert theirs.module.seen == ours.seen == [BF16] * 4
    torch.testing.assert_close(outputs[0], outputs[1])


def _take_any_dtype(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.to(module.weight.dtype) for arg in args)  # type: ignore[arg-type]


class Watched(Stack):
    """A stack that writes down what dtypes its blocks see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self._see)
        self.out.register_forward_pre_hook(_take_any_dtype)

    def _see(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen.append((args[0].dtype, block.up.weight.dtype))


@pytest.mark.parametrize("reshard_after_forward", [slow(True), False, slow(1), 2])
@ranks(slow(2), 4)
def test_full_precision_in_evaluation(reshard_after_forward: bool | int) -> None:
    """Training computes in bf16, evaluation exactly as the plain model, on the same parameters.

    Those that wait on fewer ranks between forward and backward change their dtype too.
    """
    policy = MixedPrecisionPolicy(BF16, FP32, full_precision_in_eval=True)
    model = seeded(Watched)
    shard(model, CASES["stack"], mp_policy=policy, reshard_after_forward=reshard_after_forward)
    plain = seeded(Stack)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model.seen.clear()
        x = torch.randn(4, 13)
        model.train()
        loss_of(model(x)).backward()
        advance(optimizer)
        assert set(model.seen) == {(BF16, BF16)}
        model.seen.clear()
        model.eval()
        plain.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
        with torch.no_grad():
            out = model(x)
        assert set(model.seen) == {(FP32, FP32)}
        assert_same(out, plain(x), "output")
        loss_of(model(x)).backward()  # a backward in evaluation is exact too
        plain.zero_grad()
        loss_of(plain(x)).backward()
        assert_same(model.out.weight.grad, plain.out.weight.grad, "gradient")  # type: ignore[arg-type]
        assert_same(model.blocks[0].up.bias.grad, plain.blocks[0].up.bias.grad, "gradient")
        model.zero_grad()
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))


@ranks(2)
def test_modes_of_parts_and_moments() -> None:
    """Each unit follows its own mode; between forward and backward it is an error."""
    policy = MixedPrecisionPolicy(BF16, FP32, FP32, full_precision_in_eval=True)
    model = shard(seeded(Watched), CASES["stack"], mp_policy=policy)
    model.blocks[1].eval()
    model.out.eval()  # no unit of its own
    out = model(torch.randn(4, 13))
    assert [weight for _, weight in model.seen] == [BF16, FP32, BF16]
    out.sum().backward()
    out = model(torch.randn(4, 13))
    model.eval()
    assert [b.up.weight.dtype for b in model.blocks] == [FP32] * 3
    model.train()
    assert [b.training for b in model.blocks] == [True] * 3
    with pytest.raises(fsdp2.StateError, match="between this forward and its backward"):
        out.sum().backward()
    errors: list[str] = []

    def change(*_: Any) -> None:
        with pytest.raises(fsdp2.StateError) as caught:
            model.eval()
        errors.append(str(caught.value))

    handle = model.inp.register_forward_hook(change)
    model(torch.randn(4, 13)).sum().backward()
    assert "during a forward" in errors[0]
    assert model.training
    handle.remove()
    model.eval()
    model.seen.clear()
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 13))
    twin.train()
    twin(torch.randn(4, 13)).sum().backward()
    built = seeded(Watched).eval()  # sharded while in evaluation
    shard(built, CASES["stack"], mp_policy=policy)
    built(torch.randn(4, 13))
    assert set(built.seen) == {(FP32, FP32)}
    built.train()
    built.seen.clear()
    built(torch.randn(4, 13))
    assert set(built.seen) == {(BF16, BF16)}


@pytest.mark.parametrize("reduce_dtype", with_slow([None, torch.float16], [torch.float16]))
@ranks(3)
def test_gradients_stay_in_low_precision(reduce_dtype: torch.dtype | None) -> None:
    """They are the reduced ones, and those that default policies cast up."""
    models = [
        shard(
            seeded(CASES["one_row"].build),
            CASES["one_row"],
            mp_policy=MixedPrecisionPolicy(BF16, dtype, keep_low_precision_grads=keep),
        )
        for keep, dtype in ((False, reduce_dtype or BF16), (True, reduce_dtype))
    ]
    for _ in range(2):
        x = torch.randn(4, 13)
        for model in models:
            loss_of(model(x)).backward()
            model.zero_grad() if _ == 0 else None
    dtype = reduce_dtype or BF16
    for (name, low), high in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert low.grad.dtype is low.grad.to_local().dtype is dtype
        assert low.dtype is FP32
        assert torch.equal(low.grad.to_local().float(), high.grad.to_local()), name  # type: ignore[union-attr]
    norms = [fsdp2.clip_grad_norm_(m.parameters(), 1.0) for m in models]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-2, atol=0, check_dtype=False)
    for model in models:
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@ranks(2)
def test_inputs_are_cast_at_the_root_only() -> None:
    """FSDP1's default: the root casts, units below take what comes."""
    policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=False, cast_root_forward_inputs=True)
    model = shard(seeded(Watched), CASES["stack"], mp_policy=policy)
    assert model(torch.randn(4, 13)).dtype is BF16
    assert set(model.seen) == {(BF16, BF16)}
    never = MixedPrecisionPolicy(BF16, cast_forward_inputs=False)
    model = shard(seeded(Watched), CASES["stack"], mp_policy=never)
    x = torch.randn(4, 13)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    for name in ("cast_root_forward_inputs", "keep_low_precision_grads", "full_precision_in_eval"):
        with pytest.raises(fsdp2.ConfigError, match=f"{name} to be a bool"):
            fsdp2.fully_shard(nn.Linear(1, 1), mp_policy=MixedPrecisionPolicy(**{name: 1}))
    with pytest.raises(fsdp2.ConfigError, match="buffer_dtype to be a floating-point"):
        fsdp2.fully_shard(nn.Linear(1, 1), mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.int8))


# --- ignored states -------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = WithBuffers(), WithBuffers()
        self.scale = nn.Parameter(torch.ones(29))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)) * self.scale


@ranks(2)
def test_what_is_ignored_is_left_alone() -> None:
    """Modules with all their parameters and buffers, or single ones; the rest is sharded."""
    policy = MixedPrecisionPolicy(buffer_dtype=BF16)
    for kind in ("modules", "tensors", "one"):
        model = Mixed()
        before = dict([*model.named_parameters(), *model.named_buffers()])
        ignored: Any = [model.b, model.a.norm]
        if kind == "tensors":
            ignored = {t for m in ignored for t in [*m.parameters(), *m.buffers()]}
        if kind == "one":
            ignored = model.b
        fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy, ignored_states=ignored)
        after = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in after.items():
            left = name.startswith(("b.",) if kind == "one" else ("b.", "a.norm."))
            assert (tensor is before[name]) == (left or not tensor.is_floating_point()), name
        assert isinstance(model.scale, DTensor)


@ranks(2)
def test_ignored_states_train_as_in_torch() -> None:
    """Gradients of ignored parameters are each rank's own, as FSDP1 leaves them."""
    ours, theirs = seeded(Stack), seeded(Stack)
    wrapped = FullyShardedDataParallel(
        theirs, ignored_states=[theirs.blocks[1]], use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    fsdp2.fully_shard(ours, mesh=make_mesh(), ignored_states=[ours.blocks[1]])
    x = torch.randn(2, 13) + torch.distributed.get_rank()
    for model in (wrapped, ours):
        loss_of(model(x)).backward()
    for (name, mine), other in zip(
        ours.blocks[1].named_parameters(), theirs.blocks[1].parameters(), strict=True
    ):
        assert type(mine) is nn.Parameter
        torch.testing.assert_close(mine.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")


@ranks(2)
def test_mixtures_are_refused() -> None:
    """The message says what to pass; nothing was changed."""
    model = Stack()
    wrong: list[tuple[Any, str]] = [
        ([model.inp, model.out.weight], r"found a FSDP?Linear|found a Linear and a Parameter"),
        (["inp"], "found 'inp' in it"),
        (3, "found 3 in it"),
    ]
    for states, message in wrong:
        with pytest.raises(fsdp2.ConfigError, match=message):
            fsdp2.fully_shard(model, ignored_states=states)
    assert not isinstance(model, fsdp2.FSDPModule)
    fsdp2.fully_shard(model.blocks[0].up, mesh=make_mesh())
    with pytest.raises(fsdp2.ConfigError, match="was already applied to"):
        fsdp2.fully_shard(model, ignored_states=[model.blocks[0]])
    with pytest.raises(fsdp2.ConfigError, match="as ignored_states"):
        fsdp2.fully_shard(model, ignored_params={model.blocks[1]})  # type: ignore[arg-type]
