"""Several processes on one GPU: what the lanes, kernels and copies make of real collectives.

NCCL refuses two ranks on one GPU, so these go over gloo, which copies through the host: the numbers
are shown, the order of streams is not (`test_streams` shows that).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2._base.containers import map_tensors
from tests._models import CASES, loss_of, seeded
from tests._parity import ROWS, TOLERANCE, assert_same
from tests.gpu._device import BF16, ON_A_GPU, shard

pytestmark = ON_A_GPU

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "two": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": BF16},
    "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy()},
}


def compare(name: str, mesh: DeviceMesh, how: dict[str, Any]) -> None:
    """Train a model and a plain copy on the global batch; compare gradients and parameters."""
    case = CASES[name]
    least = 4e-2 if "mp_policy" in how else 1e-5
    reference = seeded(case.build).cuda()
    build = seeded(case.build)
    model = shard(build if "offload_policy" in how else build.cuda(), case, mesh, **how)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.02)
        for m in (model, reference)
    ]
    for step in range(3):
        torch.manual_seed(step)  # the same batch on all ranks
        batch = case.batch(ROWS)
        own = batch.chunk(dist.get_rank(), dist.get_world_size())
        args, kwargs = map_tensors(Tensor.cuda, batch.args), map_tensors(Tensor.cuda, batch.kwargs)
        loss_of(reference(*args, **kwargs)).backward()
        args, kwargs = map_tensors(Tensor.cuda, own.args), map_tensors(Tensor.cuda, own.kwargs)
        loss_of(model(*args, **kwargs)).backward()
        expected = dict(reference.named_parameters())
        for key, parameter in model.named_parameters():
            at, wanted, found = f"{key}, step {step}", expected[key].grad, parameter.grad
            tolerance = max(least, TOLERANCE.get(parameter.dtype, 0.0))
            assert_same(parameter, expected[key].detach(), at, tolerance)
            assert (wanted is None) == (found is None), f"{at}: one has no gradient"
            if wanted is not None:
                assert found is not None
                assert_same(found, wanted, f"gradient of {at}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def run_everything(rank: int, size: int, folder: str, shape: tuple[int, ...]) -> None:
    """Write what failed, of all models by default settings and of one by all settings."""
    torch.cuda.set_device(0)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    failures = []
    runs = [(name, "default") for name in CASES]
    runs += [("stack", how) for how in SETTINGS if how != "two" or shape[-1] % 2 == 0]
    for name, how in runs:
        try:
            compare(name, mesh, SETTINGS[how])
        except Exception:  # all of them are reported
            failures.append(f"{name}, {how}: {traceback.format_exc()[-1500:]}")
    Path(folder, str(rank)).write_text("\n".join(failures))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["three ranks", "2 replicas of 2"])
def test_ranks_train_as_a_plain_model_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    mp.spawn(run_everything, (size, str(tmp_path), shape), nprocs=size)  # type: ignore[no-untyped-call]
    failures = [(tmp_path / str(rank)).read_text() for rank in range(size)]
    if any(failures):
        pytest.fail("\n".join(failures))
