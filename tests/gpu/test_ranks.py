"""Several processes on one GPU: what the lanes, kernels and copies make of real collectives.

gloo copies through the host, so it shows numbers and no order of streams. NCCL is told that the
ranks are on several hosts (`share_a_gpu_over_nccl`): its kernels run in the lanes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2._core.base.containers import map_tensors
from tests.gpu._device import BF16, ON_A_GPU, shard
from tests.kit import meshes
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import ROWS, TOLERANCE, assert_same

pytestmark = ON_A_GPU

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "two": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": BF16},
    "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy()},
}


COMPILED = {
    f"{how}, overlap={overlap}": (SETTINGS[how], partial(fsdp2.compile, overlap=overlap))
    for how in ("default", "bf16")
    for overlap in (False, True)
}


def compare(
    name: str,
    mesh: DeviceMesh,
    how: dict[str, Any],
    compile_it: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Train a model and a plain copy on the global batch; compare gradients and parameters."""
    case = CASES[name]
    least = 4e-2 if "mp_policy" in how else 1e-5
    reference = seeded(case.build).cuda()
    build = seeded(case.build)
    model = shard(build if "offload_policy" in how else build.cuda(), case, mesh, **how)
    run = model if compile_it is None else compile_it(model)
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
        loss_of(run(*args, **kwargs)).backward()
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


def enter(
    rank: int,
    size: int,
    folder: str,
    shape: tuple[int, ...],
    backend: str,
    run: Callable[[DeviceMesh], list[str]],
) -> None:
    """Write into a file of this rank what ``run`` found."""
    torch.cuda.set_device(0)
    meshes.BACKEND = backend
    store = f"file://{folder}/store"
    made = meshes.backend_of("cuda")
    dist.init_process_group(made, init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    Path(folder, str(rank)).write_text("\n".join(run(mesh)))
    dist.barrier()
    dist.destroy_process_group()


def spawn(
    folder: Path, shape: tuple[int, ...], backend: str, run: Callable[[DeviceMesh], list[str]]
) -> None:
    size = torch.Size(shape).numel()
    mp.spawn(enter, (size, str(folder), shape, backend, run), nprocs=size)  # type: ignore[no-untyped-call]
    failures = [(folder / str(rank)).read_text() for rank in range(size)]
    if any(failures):
        pytest.fail("\n".join(failures))


def failures_of(runs: dict[str, Callable[[], None]]) -> list[str]:
    failures = []
    for name, run in runs.items():
        try:
            run()
        except Exception:  # all of them are reported
            failures.append(f"{name}: {traceback.format_exc()[-1500:]}")
    return failures


def train_all(mesh: DeviceMesh) -> list[str]:
    """Train all models by default settings, and one by all settings."""
    runs = {name: partial(compare, name, mesh, {}) for name in CASES}
    for name, how in SETTINGS.items():
        if name != "two" or mesh.shape[-1] % 2 == 0:
            runs[f"stack, {name}"] = partial(compare, "stack", mesh, how)
    return failures_of(runs)  # type: ignore[arg-type]  # partial objects are callables


def train_compiled(mesh: DeviceMesh) -> list[str]:
    runs = {
        name: partial(compare, "stack", mesh, how, compile_it)
        for name, (how, compile_it) in COMPILED.items()
    }
    return failures_of(runs)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["three ranks", "2 replicas of 2"])
def test_ranks_train_as_a_plain_model_does(
    tmp_path: Path, shape: tuple[int, ...], backend: str
) -> None:
    spawn(tmp_path, shape, backend, train_all)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["two ranks", "2 replicas of 2"])
def test_compiled_ranks_train_as_a_plain_model_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    spawn(tmp_path, shape, "nccl", train_compiled)
