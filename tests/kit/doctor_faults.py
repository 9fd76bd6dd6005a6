"""Plant a fault, and run the doctor: `python -m tests.kit.doctor_faults NAME CHECKS arguments...`.

Owns the faults of `tests/behaviour/test_doctor.py`. Nothing in the package knows of them: each is
what a user's program, environment or machine may do to it. One rank is ill, unless all are.
The doctor on the simulated device is
`FSDP2_TEST_DEVICE=sim torchrun --nproc-per-node 2 -m tests.kit.doctor_faults nothing all --quick`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp2
from fsdp2._core.base import torch_comm
from fsdp2._tools.doctor import right, run
from tests.kit import meshes

ILL = 1
"""The rank that is, where one is."""
SLOWER = 15
"""How many times as long it takes for what others do, at least: more than a busy machine does."""


def is_ill() -> bool:
    return int(os.environ["RANK"]) == ILL


def nothing(_: pytest.MonkeyPatch) -> None:
    """All is well."""


def slow_rank(patch: pytest.MonkeyPatch) -> None:
    """One rank takes many times as long for a product of matrices."""
    product = torch.Tensor.__matmul__

    def slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        for _ in range(SLOWER):
            product(left, right)
        return product(left, right)

    if is_ill():
        patch.setattr(torch.Tensor, "__matmul__", slow)


def divide_factor(patch: pytest.MonkeyPatch) -> None:
    """What the user does to each unit divides its gradients once more."""
    shard = fsdp2.fully_shard

    def sharded(module: Any, **keywords: Any) -> Any:
        unit = shard(module, **keywords)
        unit.set_gradient_divide_factor(2.0 * dist.get_world_size())
        return unit

    patch.setattr(fsdp2, "fully_shard", sharded)


def other_version(patch: pytest.MonkeyPatch) -> None:
    """One rank has another torch."""
    if is_ill():
        patch.setattr(torch, "__version__", "2.12.1+other")


def mixed_folders(patch: pytest.MonkeyPatch) -> None:
    """A module of the package was loaded from another folder."""
    if is_ill():
        patch.setattr(fsdp2.wrap, "__file__", "/opt/older/fsdp2/wrap.py")


def other_precision(patch: pytest.MonkeyPatch) -> None:
    """One rank may round products of matrices more."""
    if is_ill():
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")


def other_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """A device of one rank computes a little else."""
    forward = right.Model.forward
    if is_ill():
        patch.setattr(right.Model, "forward", lambda self, x: forward(self, x) * (1 + 1e-5))


def stopped(patch: pytest.MonkeyPatch) -> None:
    """One rank stops in the middle of a check, as under a debugger."""
    build = right.build

    def stop(*arguments: Any) -> Any:
        if is_ill():
            os.kill(os.getpid(), signal.SIGSTOP)
        return build(*arguments)

    patch.setattr(right, "build", stop)


def corrupting_link(patch: pytest.MonkeyPatch) -> None:
    """A bit is flipped in what the last rank sends to one rank."""
    gather = torch_comm.all_gather_single

    def flipping(output: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        work = gather(output, *rest, **keywords)
        if is_ill() and work is None:
            output.view(torch.uint8)[-1:].bitwise_xor_(64)
        return work

    patch.setattr(torch_comm, "all_gather_single", flipping)


class _Flipping(fsdp2.AllGather):
    """A gather of the user's own that has an error."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        torch_comm.all_gather_single(output_tensor, input_tensor, group)
        output_tensor.view(torch.int32)[::7].bitwise_xor_(1 << 22)


def corrupting_comm(patch: pytest.MonkeyPatch) -> None:
    """A custom all-gather flips bits."""
    shard = fsdp2.fully_shard

    def sharded(module: Any, **keywords: Any) -> Any:
        unit = shard(module, **keywords)
        unit.set_custom_all_gather(_Flipping())
        return unit

    patch.setattr(fsdp2, "fully_shard", sharded)


def clock(patch: pytest.MonkeyPatch) -> None:
    """The clock of one rank is two minutes ahead."""
    now = time.time
    if is_ill():
        patch.setattr(time, "time", lambda: now() + 120.0)


def threads(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes many more threads than there are cores."""
    patch.setattr(torch, "get_num_threads", lambda: 4 * (os.cpu_count() or 1))


def raising(patch: pytest.MonkeyPatch) -> None:
    """One rank raises where the others communicate."""

    def without_memory(*_: Any) -> None:
        raise MemoryError("no memory on this rank")

    if is_ill():
        patch.setattr(right, "_pattern", without_memory)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    fault.__name__: fault
    for fault in (
        *(nothing, slow_rank, divide_factor, other_version, mixed_folders, other_precision),
        *(other_arithmetic, stopped, corrupting_link, corrupting_comm, clock, threads, raising),
    )
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault in this process; what it changed is put back behind it."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name](patch)
        yield


def doctor(name: str, checks: str, *arguments: str) -> int:
    """Run the named checks (``all``, or names with commas) with a fault on this rank."""
    chosen = [one for one in run.CHECKS if checks == "all" or one.name in checks.split(",")]
    if meshes.DEVICE == "sim":
        meshes.use_device("sim")
    with planted(name):
        return run.main(arguments, chosen)


def main(arguments: Sequence[str]) -> int:
    return doctor(*arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
