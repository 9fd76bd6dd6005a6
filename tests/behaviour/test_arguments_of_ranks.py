"""Promise: an argument that one rank alone has wrong, or has otherwise, is an error on every rank.

Each of these left the other ranks waiting until the process group's time limit, or ended a process.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fsdp2
from fsdp2 import checkpoint
from tests.kit.pool import ranks

WIDTH = 13


class Call(NamedTuple):
    """A call on all ranks: what one rank passes in place of the others' argument."""

    function: Callable[..., Any]
    right: dict[str, Any]  # MODEL and FOLDER stand for these
    other: dict[str, Any]
    code: str


def summon(module: nn.Module, **flags: Any) -> None:
    with fsdp2.summon_full_params(module, **flags):
        pass


def stream(module: nn.Module, **given: Any) -> None:
    list(fsdp2.full_params(module, **given))


MODEL, FOLDER = object(), object()
OPTIMIZER = torch.optim.SGD([torch.zeros(1)])
MODEL_ONLY = {"model": MODEL}
ON_DISK = {"path": FOLDER, "model": MODEL}
TENSORS = {"folder": FOLDER, "model": MODEL}
STATE = {"model": MODEL, "state": {"model": {}}}
CPU = {"model": MODEL, "device": "cpu"}
MODULE = {"module": MODEL}
BYTES = {"module": MODEL, "max_bytes": 1000}
NOWHERE = f"cuda:{torch.cuda.device_count()}"

CALLS = {
    "save, path": Call(checkpoint.save, ON_DISK, {"path": 3}, "FS101"),
    "save, model": Call(checkpoint.save, ON_DISK, {"model": "model"}, "FS101"),
    "save, optimizer": Call(checkpoint.save, ON_DISK, {"optimizer": 3}, "FS101"),
    "save, one optimizer": Call(checkpoint.save, ON_DISK, {"optimizer": OPTIMIZER}, "FS409"),
    "save, no tensors": Call(
        checkpoint.save,
        ON_DISK | {"extra": {"mean": MODEL}},
        {"extra": {"mean": 0.0}},
        "FS409",
    ),
    "load, path": Call(checkpoint.load, ON_DISK, {"path": None}, "FS101"),
    "load, strict": Call(checkpoint.load, ON_DISK, {"strict": 2}, "FS101"),
    "load, not strict": Call(checkpoint.load, ON_DISK, {"strict": False}, "FS409"),
    "load, key": Call(checkpoint.load, ON_DISK, {"model_key": None}, "FS409"),
    "full_state, model": Call(checkpoint.full_state, MODEL_ONLY, {"model": 3}, "FS101"),
    "full_state, bytes": Call(checkpoint.full_state, MODEL_ONLY, {"max_bytes": "x"}, "FS101"),
    "full_state, few bytes": Call(checkpoint.full_state, MODEL_ONLY, {"max_bytes": 64}, "FS409"),
    "full_state, many bytes": Call(
        checkpoint.full_state, MODEL_ONLY, {"max_bytes": 10**5000}, "FS102"
    ),
    "full_state, all": Call(checkpoint.full_state, MODEL_ONLY, {"rank0_only": False}, "FS409"),
    "load_full_state": Call(checkpoint.load_full_state, STATE, {"strict": "x"}, "FS101"),
    "load_full_state, own": Call(checkpoint.load_full_state, STATE, {"from_rank0": False}, "FS409"),
    "load_local_state": Call(checkpoint.load_local_state, STATE, {"optimizer": "x"}, "FS101"),
    "load_sharded_state": Call(checkpoint.load_sharded_state, STATE, {"optimizer": "x"}, "FS101"),
    "save_safetensors": Call(checkpoint.save_safetensors, TENSORS, {"folder": 3}, "FS101"),
    "save_safetensors, dtype": Call(
        checkpoint.save_safetensors, TENSORS, {"dtype": torch.bfloat16}, "FS409"
    ),
    "load_safetensors": Call(checkpoint.load_safetensors, TENSORS, {"folder": 3}, "FS101"),
    "materialize, device": Call(fsdp2.materialize, CPU, {"device": 3.5}, "FS101"),
    "materialize, no device": Call(fsdp2.materialize, CPU, {"device": NOWHERE}, "FS102"),
    "materialize, init": Call(fsdp2.materialize, CPU, {"init": 3}, "FS101"),
    "materialize, sync": Call(fsdp2.materialize, CPU, {"sync_from_rank0": True}, "FS409"),
    "summon, writeback": Call(summon, MODULE, {"writeback": 3}, "FS101"),
    "summon, both": Call(summon, MODULE, {"rank0_only": True}, "FS307"),
    "summon, one": Call(summon, MODULE, {"rank0_only": True, "writeback": False}, "FS409"),
    "summon, gradients": Call(summon, MODULE, {"with_grads": True}, "FS409"),
    "full_params, bytes": Call(stream, BYTES, {"max_bytes": "x"}, "FS101"),
    "full_params, few bytes": Call(stream, BYTES, {"max_bytes": 64}, "FS409"),
    "full_params, names": Call(stream, BYTES, {"names": "weight".__eq__}, "FS409"),
    "sync_from_rank0": Call(fsdp2.sync_from_rank0, MODEL_ONLY, {"model": "model"}, "FS101"),
}


@pytest.mark.parametrize("name", CALLS)
@ranks(2, limit_s=20)
def test_every_rank_raises_the_same(name: str, rank: int) -> None:
    torch.manual_seed(0)
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH))
    before = model.weight.to_local().clone()
    call = CALLS[name]
    told = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(told)
    stands = {id(MODEL): model, id(FOLDER): Path(told[0])}
    given = call.right | (call.other if rank == 1 else {})
    given = {key: stands.get(id(value), value) for key, value in given.items()}
    if given.get("extra", {}).get("mean") is MODEL:
        given["extra"] = {"mean": model.weight}
    with pytest.raises(fsdp2.FSDPError) as caught:
        call.function(**given)
    assert caught.value.code == call.code
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(caught.value))
    assert texts[0] == texts[1]
    if call.code == "FS409":
        assert "on rank 0, and " in texts[0]
    assert torch.equal(model.weight.to_local(), before)
    assert not list(Path(told[0]).iterdir())
    model(torch.ones(2, WIDTH)).sum().backward()


@ranks(2, limit_s=20)
def test_an_extra_of_the_first_rank_alone(rank: int) -> None:
    """``save`` keeps the first rank's, so the others need not have one."""
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH))
    told = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(told)
    checkpoint.save(told[0], model, extra={"step": 3} if rank == 0 else None)
    assert checkpoint.load(told[0], model) == {"step": 3}


@ranks(2, limit_s=20)
@pytest.mark.parametrize("kind", [ArithmeticError, AttributeError, MemoryError, RecursionError])
def test_a_fault_of_one_ranks_program(kind: type[Exception], rank: int) -> None:
    """It is caught there by its own class, too, and the other rank is told of it."""
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH))

    def fails(*_: Any) -> None:
        if rank == 1:
            raise kind("by this rank")

    model.register_state_dict_post_hook(fails)
    for function in (checkpoint.full_state, lambda model: checkpoint.save("unused", model)):
        with pytest.raises(fsdp2.StateError, match="by this rank") as caught:
            function(model)
        assert f"rank 1 failed with {kind.__name__}" in str(caught.value)
        assert caught.value.code == "FS403"
        is_its_own = rank == 1 and kind is not ArithmeticError  # which no program's fault is
        assert isinstance(caught.value, kind) == is_its_own
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.code) == (fsdp2.StateError, "FS403")


@ranks(2, limit_s=20)
def test_a_tensor_on_a_mesh_that_one_rank_lacks(rank: int) -> None:
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH))
    alone = distribute_tensor(torch.ones(WIDTH), DeviceMesh("cpu", [0]), [Replicate()])
    model.register_buffer("kept", alone)
    with pytest.raises(fsdp2.ConfigError, match="rank 1 has a DTensor") as caught:
        checkpoint.full_state(model)
    assert caught.value.code == "FS625"
    model(torch.ones(2, WIDTH)).sum().backward()


@ranks(4, limit_s=20)
def test_where_the_first_rank_has_whole_parameters(rank: int) -> None:
    """Ranks take the same process groups for the comparison, whatever each has registered."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp2.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    with fsdp2.summon_full_params(model, rank0_only=True, writeback=False):
        with pytest.raises(fsdp2.StateError) as caught:
            summon(model)
        assert caught.value.code == "FS307"
    model(torch.ones(2, WIDTH)).sum().backward()
