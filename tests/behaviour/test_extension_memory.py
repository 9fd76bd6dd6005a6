"""Promise: extended parameters cost no collective of their own, and their memory is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.kit.extensions import (
    MIDDLES,
    WIDTH,
    Apart,
    Bare,
    Int8Weight,
    PaddedInt8Weight,
    apart,
    make,
    make_even,
    set_methods,
    shard,
    train,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow


@pytest.mark.parametrize("kind", with_slow([Int8Weight, PaddedInt8Weight], [PaddedInt8Weight]))
@ranks(slow(2), 3)
def test_one_all_gather_for_each_unshard(kind: type[Int8Weight]) -> None:
    """A group's flat parameters and all inputs of its extended ones travel in one all-gather."""
    model = shard(make(kind=kind))
    for _ in range(3):
        with CommDebugMode() as comm:
            loss = model(torch.randn(4, WIDTH)).sum()
        assert comm.get_total_counts() == len(MIDDLES)
        with CommDebugMode() as comm:
            loss.backward()
        assert comm.get_total_counts() == 2 * len(MIDDLES)


@ranks(2)
def test_memory_is_freed() -> None:
    """Resharding frees outputs and inner tensors; the unsharded parameter stays one object."""
    model = shard(make((13,)))
    block = model[0]
    objects = set()
    for _ in range(3):
        block.unshard()
        up = block.up
        assert isinstance(up, Int8Weight)
        assert isinstance(up, nn.Parameter)
        objects.add(id(up))
        storages = [t.untyped_storage() for t in (up.codes, up.scales)]
        assert [s.nbytes() for s in storages] == [13 * WIDTH, 13 * 4]
        assert torch.equal(up.values(), make((13,))[0].up.values())
        block.reshard()
        assert [s.nbytes() for s in storages] == [0, 0]
        assert isinstance(block.up, DTensor)
    assert len(objects) == 1


@ranks(2)
def test_memory_of_what_post_made_is_freed() -> None:
    """A tensor that post computed and named as inner is freed and made anew, in place."""
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    for _ in range(2):
        model[0].unshard()
        whole = model[0].up
        assert whole.dtype is torch.float32
        torch.testing.assert_close(whole, make((13,), kind=None)[0].up.bfloat16().float())
        model[0].reshard()
        assert whole.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("answer", [None, False, True])
@ranks(2, slow(3))
def test_memory_of_gathered_tensors_is_freed_if_the_extension_says_so(answer: Any) -> None:
    """With True it is gone as soon as the parameter is made, else when it is resharded."""
    kind = apart(answer)
    block = shard(make((13,), kind=kind))[0]
    expected = make((13,))[0].up.values()
    objects = set()
    for _ in range(3):
        Apart.gathered.clear()
        block.unshard()
        objects.add(id(block.up))
        torch.testing.assert_close(block.up.data, expected, rtol=0, atol=0)
        own = block.up.untyped_storage()
        assert own.nbytes() == 13 * WIDTH * 4
        found = [storage.nbytes() for pair in Apart.gathered.values() for storage in pair]
        full = [13 * WIDTH, 13 * 4, 13 * WIDTH, WIDTH * 4]
        assert found == ([0] * 4 if answer else full)
        block.reshard()
        found = [storage.nbytes() for pair in Apart.gathered.values() for storage in pair]
        assert found == [0] * 4
        assert own.nbytes() == 0
    assert len(objects) == 1
    assert kind.asked == (0 if answer is None else 2), "once for each parameter"


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2, slow(3))
def test_training_while_gathered_tensors_are_freed(reshard_after_forward: bool) -> None:
    """Gradients and steps are those of one process, whether backward gathers again or not."""
    train(shard(make(kind=apart(True)), reshard_after_forward=reshard_after_forward), make())


@ranks(2)
def test_torchs_own_trains_the_same_while_gathered_tensors_are_freed() -> None:
    """The same class under torch's fully_shard (older ones do not ask): the same codes."""
    even = (12, 2)
    models = shard(make_even(even, apart(True))), shard(make_even(even, apart(True)), torch_fsdp)
    for model in models:
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            model(torch.randn(5, WIDTH + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        a, b = mine._local_tensor, other._local_tensor
        if isinstance(b, Bare):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)
        else:
            assert torch.equal(a, b)
