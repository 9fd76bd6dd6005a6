"""Machines that a plan's time line is made for: what they compute, and what their links carry.

Owns the description, a few known machines with the source of each figure, and the measurement of
the machine that it runs on. It must not know models.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._core.base.arguments import (
    check_count,
    check_key,
    check_mapping,
    check_number,
    check_path,
    wrong_type,
    wrong_value,
)
from fsdp2._core.comm.mesh import default_device_type

__all__ = ["HARDWARE", "Hardware", "hardware_for", "measure"]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Hardware:
    """What one rank can do. Peak figures: a real step reaches a part of them; see ``scaled``.

    Args:
        name: what pages call it.
        flops: floating-point operations a second in products of matrices, by the dtype of what is
            multiplied. ``torch.float32`` must be there, and stands for what is not.
        memory_bandwidth: bytes a second that are read and written.
        near: bytes a second that one rank sends, and at the same time receives, inside a node.
        far: bytes a second of one rank's share of the links between nodes: its own port, or an
            eighth of one that eight ranks share.
        ranks_per_node: ranks that share a node.
        latency: seconds of one hop. A collective over N ranks takes as many hops as N has binary
            digits.
        memory_nbytes: bytes of one device, as ``torch.cuda.mem_get_info`` has them: that is less
            than a data sheet says. None if it is not known.
        device_type: as ``torch.device`` has it. The engine sends large parameters as it does on
            such a device.
        source: where the figures are from.
        compute_share: what part of the machine's peak ``flops`` are, after ``scaled``. MFU is
            counted over the peak.

    Raises:
        ConfigError: a figure is not a number above 0 (``latency`` may be 0); ``flops`` without
            float32; no such kind of device.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    near: float
    far: float
    ranks_per_node: int = 8
    latency: float = 0.0
    memory_nbytes: int | None = None
    device_type: str = "cuda"
    source: str = field(default="", compare=False)
    compute_share: float = 1.0

    def __post_init__(self) -> None:
        check_key("Hardware", "name", self.name)
        flops = check_mapping("Hardware", "flops", self.flops)
        if FP32 not in flops or not all(isinstance(dtype, torch.dtype) for dtype in flops):
            raise wrong_value(
                "Hardware", "flops", "operations a second by dtype, torch.float32 included", flops
            )
        for dtype, rate in flops.items():
            _check_rate(f"flops[{dtype}]", rate)
        for name in ("memory_bandwidth", "near", "far", "compute_share"):
            _check_rate(name, getattr(self, name))
        check_count("Hardware", "ranks_per_node", self.ranks_per_node)
        check_number("Hardware", "latency", self.latency, "a number of seconds", 0.0)
        if self.memory_nbytes is not None:
            check_count("Hardware", "memory_nbytes", self.memory_nbytes)
        check_key("Hardware", "device_type", self.device_type)
        try:
            torch.device(self.device_type)
        except RuntimeError as error:
            raise wrong_value(
                "Hardware", "device_type", "a kind of device, as 'cuda' or 'cpu'", self.device_type
            ) from error
        check_key("Hardware", "source", self.source)

    def scaled(self, *, compute: float = 1.0, memory: float = 1.0, links: float = 1.0) -> Hardware:
        """Return a copy with parts of its figures: what share of a peak your own kernels reach.

        Args:
            compute: factor on ``flops``.
            memory: factor on ``memory_bandwidth``.
            links: factor on ``near`` and ``far``.

        Raises:
            ConfigError: a factor is not a number above 0.
        """
        for name, factor in (("compute", compute), ("memory", memory), ("links", links)):
            check_number("Hardware.scaled", name, factor, "a number above 0", _LEAST)
        return replace(
            self,
            flops={dtype: rate * compute for dtype, rate in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth * memory,
            near=self.near * links,
            far=self.far * links,
            compute_share=self.compute_share * compute,
        )

    def to_values(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them; ``from_values`` reads them."""
        flops = {str(dtype).removeprefix("torch."): rate for dtype, rate in self.flops.items()}
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"flops": flops}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Hardware:
        """Return the machine that ``to_values`` told of.

        Raises:
            ConfigError: another set of names; a figure that cannot be.
        """
        who = "Hardware.from_values"
        given = dict(check_mapping(who, "values", values))
        wanted = [one.name for one in fields(cls)]
        if not set(given) <= set(wanted) or not {"name", "flops"} <= set(given):
            raise wrong_value(who, "values", f"the figures {', '.join(wanted)}", values)
        rates = check_mapping(who, "flops", given["flops"])
        dtypes = [getattr(torch, str(name), None) for name in rates]
        try:
            return cls(**given | {"flops": dict(zip(dtypes, rates.values(), strict=True))})
        except TypeError as error:
            raise wrong_value(who, "values", f"the figures {', '.join(wanted)}", values) from error


_LEAST = sys.float_info.min


def _check_rate(name: str, value: object) -> None:
    check_number("Hardware", name, value, "a number above 0", _LEAST)


def flops_of(machine: Hardware, dtype: torch.dtype) -> float:
    """Return operations a second for operands of a dtype."""
    return machine.flops.get(dtype, machine.flops[FP32])


def bandwidth_of(machine: Hardware, ranks: int, stride: int) -> float:
    """Return what a rank sends a second in rings of ranks that are ``stride`` apart.

    Where they go through several nodes, each rank of a node is the door of one ring, and the bytes
    are divided among the rings. So a group with all 8 ranks of a node has 8 ports, and one with a
    rank of each node (replicas) has one, because the other 7 serve the other 7 groups. NCCL does
    so: nccl-tests see 46 to 48 GB/s for each port of 400 Gb/s (NVIDIA/nccl-tests#290).
    """
    if ranks * stride <= machine.ranks_per_node:
        return machine.near
    together = max(1, machine.ranks_per_node // stride)
    ports = ranks % together or together  # those of the node that has the fewest
    return min(machine.near, ports * machine.far)


def seconds_of(machine: Hardware, kind: str, nbytes: int, ranks: int, stride: int) -> float:
    """Return how long a collective takes alone: bytes of its larger buffer, in a ring.

    An all-reduce sends everything twice.
    """
    if ranks == 1 or nbytes == 0:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    sent = rounds * nbytes * (ranks - 1) / ranks
    hops = rounds * math.ceil(math.log2(ranks))
    return hops * machine.latency + sent / bandwidth_of(machine, ranks, stride)


_HOP = 3e-6
"""Seconds of a hop: what public NCCL tests show for small messages, between 2 and 10 us."""

_GIB = 1 << 30
_OF_80 = int(79.1 * _GIB)
"""Bytes that torch reports of an A100 or H100 of "80 GB"; an H100's are 79.1 to 79.6 GiB, by board
and driver. Messages of CUDA's allocator have the same figure ("a total capacity of 79.11 GiB").
"""

HARDWARE = {
    one.name: one
    for one in (
        Hardware(
            "a100-nvlink-ib",
            {FP32: 19.5e12, BF16: 312e12, FP16: 312e12},
            memory_bandwidth=2.039e12,
            near=300e9,
            far=25e9,
            latency=_HOP,
            memory_nbytes=_OF_80,
            source="NVIDIA A100 80GB SXM data sheet (2022): dense rates, NVLink 600 GB/s both ways "
            "together; DGX A100: one HDR InfiniBand port of 200 Gb/s a GPU",
        ),
        Hardware(
            "h100-nvlink-ib",
            {FP32: 67e12, BF16: 989.4e12, FP16: 989.4e12},
            memory_bandwidth=3.35e12,
            near=450e9,
            far=50e9,
            latency=_HOP,
            memory_nbytes=_OF_80,
            source="NVIDIA H100 SXM data sheet (2023): half of the rates with sparsity, NVLink "
            "900 GB/s both ways together; DGX H100: one NDR InfiniBand port of 400 Gb/s a GPU",
        ),
        Hardware(
            "h200-nvlink-ib",
            {FP32: 67e12, BF16: 989.4e12, FP16: 989.4e12},
            memory_bandwidth=4.8e12,
            near=450e9,
            far=50e9,
            latency=_HOP,
            memory_nbytes=int(139.7 * _GIB),
            source="NVIDIA H200 SXM data sheet (2024): half of the rates with sparsity, NVLink "
            "900 GB/s both ways together; DGX H200: one NDR InfiniBand port of 400 Gb/s a GPU",
        ),
        Hardware(
            "b200-nvlink-ib",
            {FP32: 75e12, BF16: 2250e12, FP16: 2250e12},
            memory_bandwidth=8e12,
            near=900e9,
            far=50e9,
            latency=_HOP,
            memory_nbytes=int(178.3 * _GIB),
            source="NVIDIA DGX B200 data sheet (2024), an eighth of it: half of the rates with "
            "sparsity, NVLink 1.8 TB/s both ways together; one InfiniBand port of 400 Gb/s a GPU",
        ),
        Hardware(
            "a100-pcie",
            {FP32: 19.5e12, BF16: 312e12, FP16: 312e12},
            memory_bandwidth=1.935e12,
            near=32e9,
            far=12.5e9,
            latency=_HOP,
            memory_nbytes=_OF_80,
            source="NVIDIA A100 80GB PCIe data sheet (2022): PCIe 4.0 x16, 64 GB/s both ways "
            "together; a port of 100 Gb/s a GPU is assumed",
        ),
        Hardware(
            "rtx4090-pcie",
            {FP32: 82.6e12, BF16: 165.2e12, FP16: 165.2e12},
            memory_bandwidth=1.008e12,
            near=16e9,
            far=12.5e9,
            latency=_HOP,
            memory_nbytes=int(23.5 * _GIB),
            source="NVIDIA Ada architecture white paper (2022): dense rates, sums in fp32; PCIe "
            "4.0 x16 without copies between cards, so that each byte passes the host: half of 32 "
            "GB/s is assumed, and a port of 100 Gb/s a GPU",
        ),
    )
}
"""Machines that ``plan`` knows by name."""


def hardware_for(found: object) -> Hardware | None:
    """Return the machine that a user names or describes, or whose file of the doctor is given."""
    if found is None or isinstance(found, Hardware):
        return found
    if isinstance(found, os.PathLike) or (isinstance(found, str) and found.endswith(".json")):
        return _read(check_path("plan", "hardware", found))
    if not isinstance(found, str):
        expected = "a name, a file of the doctor, a fsdp2.plans.Hardware or None"
        raise wrong_type("plan", "hardware", expected, found)
    # the table has the usual machine of each device first, so "a100" is the one with NVLink
    meant = [name for name in HARDWARE if name.startswith(f"{found.lower()}-")]
    name = found if found in HARDWARE else next(iter(meant), None)
    if name is None:
        known = ", ".join(sorted(HARDWARE))
        raise wrong_value("plan", "hardware", f"one of {known}, or a file of the doctor", found)
    return HARDWARE[name]


FILE = "a file that the doctor wrote, or one of Hardware.to_values() as JSON"


def _read(path: str) -> Hardware:
    """Return the machine that ``python -m fsdp2 doctor --json`` measured, or ``to_values`` told."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        hint = f"{type(error).__name__}: {error}"
        raise wrong_value("plan", "hardware", FILE, path, hint) from error
    figures = values.get("hardware", values) if isinstance(values, dict) else None
    if not isinstance(figures, dict) or "flops" not in figures:
        hint = "It has no figures of a machine; the doctor measures them on two ranks or more."
        raise wrong_value("plan", "hardware", FILE, path, hint)
    return Hardware.from_values(figures)


# Measurement.

PRODUCT = 1024
"""Rows and columns of the matrices that are multiplied."""
COPIED, GATHERED = 1 << 26, (1 << 10, 1 << 24)
"""Bytes that are copied, and the two sizes that are gathered by each rank."""
REPEATS = 5


def measure(name: str = "measured") -> Hardware:
    """Measure this machine: products of matrices, copies, and all-gathers over all ranks.

    With a process group of several ranks every rank calls it, and all get the same: the slowest
    product, copy and link decides. Without one the links are those of nobody, infinitely fast.
    Takes about a second.

    Returns:
        A ``Hardware`` whose ``far`` is its ``near``: one link was measured, over all ranks.
    """
    device = torch.device(default_device_type())
    rates = [_product_rate(dtype, device) for dtype in (FP32, BF16, FP16)]
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = 2 * COPIED / _seconds(lambda: target.copy_(source), device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    latency, link = (0.0, math.inf) if ranks == 1 else _measure_link(ranks, device)
    if ranks > 1:  # the same on every rank, so that plans are the same
        found = torch.tensor([*rates, copies], dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        *rates, copies = found.tolist()
    total = None
    module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
    if hasattr(module, "mem_get_info"):  # not every kind of device says
        total = module.mem_get_info()[1]
    return Hardware(
        name,
        dict(zip((FP32, BF16, FP16), rates, strict=True)),
        copies,
        near=link,
        far=link,
        ranks_per_node=max(ranks, 1),
        latency=latency,
        memory_nbytes=total,
        device_type=device.type,
        source=f"measured on {ranks} ranks, torch {torch.__version__}",
    )


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    size = PRODUCT if device.type != "cpu" else PRODUCT // 2
    left = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _seconds(lambda: left @ left, device)


def _measure_link(ranks: int, device: torch.device) -> tuple[float, float]:
    """Return the latency of a hop and the bandwidth, from two sizes; the slowest rank decides."""
    took = []
    for nbytes in GATHERED:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        received = [torch.empty_like(sent) for _ in range(ranks)]
        took.append(_seconds(lambda: dist.all_gather(received, sent), device))  # noqa: B023  # at once
    found = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    small, large = found.tolist()
    moved = (ranks - 1) * (GATHERED[1] - GATHERED[0])
    bandwidth = moved / max(large - small, 1e-9)
    hops = math.ceil(math.log2(ranks))
    return max(small - (ranks - 1) * GATHERED[0] / bandwidth, 0.0) / hops, bandwidth


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the least time of a few runs, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
