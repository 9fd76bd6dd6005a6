"""Machines for the timelines of plans: ``Hardware`` describes a machine, ``hardware.json`` lists
known machines with their sources, and ``measure`` measures the current machine."""

from __future__ import annotations

import json
import math
import os
import sys
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._core.base.errors import (
    check_count,
    check_key,
    check_mapping,
    check_number,
    check_path,
    wrong_type,
    wrong_value,
)
from fsdp2._core.comm.mesh import default_device_type

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FILE = "a file written by the doctor, or Hardware.to_values() as JSON"
PRODUCT = 1024
"""Number of rows and columns of the matrices that ``measure`` multiplies."""
COPIED, GATHERED = 1 << 26, (1 << 10, 1 << 24)
"""Bytes that ``measure`` copies, and the two sizes of the all-gather inputs, in bytes per rank."""
REPEATS = 5
_LEAST = sys.float_info.min


@dataclass(frozen=True)
class Hardware:
    """Peak capabilities of one rank. A real step reaches a fraction of them; see ``scaled``.

    Args:
        name: shown on pages.
        flops: floating-point operations per second in matmuls, keyed by the dtype of the operands.
            ``torch.float32`` is required; its rate is the default for missing dtypes.
        memory_bandwidth: bytes read and written per second.
        near: bytes per second that one rank sends, and simultaneously receives, inside a node.
        far: bytes per second of one rank's share of the links between nodes (its own port, or an
            eighth of a port that eight ranks share).
        ranks_per_node: the number of ranks on a node.
        latency: seconds of one hop. A collective over N ranks takes ``ceil(log2(N))`` hops;
            an all-reduce takes twice as many.
        memory_nbytes: memory of one device in bytes, as reported by ``torch.cuda.mem_get_info``
            (less than a data sheet states). None if unknown.
        device_type: a device type of ``torch.device``. The plan sends large parameters as the
            engine does on such a device.
        source: the source of the figures.
        compute_share: ``flops`` as a fraction of the machine's peak, as set by ``scaled``. MFU is
            relative to the peak.

    Raises:
        ConfigError: a figure is not a number above 0 (``latency`` may be 0); ``flops`` lacks
            float32; the device type is unknown.
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
        for name in ("name", "device_type", "source"):
            check_key("Hardware", name, getattr(self, name))
        flops = check_mapping("Hardware", "flops", self.flops)
        if FP32 not in flops or not all(isinstance(dtype, torch.dtype) for dtype in flops):
            expected = "operations per second by dtype, including torch.float32"
            raise wrong_value("Hardware", "flops", expected, flops)
        rates = {f"flops[{dtype}]": rate for dtype, rate in flops.items()}
        for name in ("memory_bandwidth", "near", "far", "compute_share"):
            rates[name] = getattr(self, name)
        for name, rate in rates.items():
            check_number("Hardware", name, rate, "a number above 0", _LEAST)
        check_count("Hardware", "ranks_per_node", self.ranks_per_node)
        check_number("Hardware", "latency", self.latency, "a number of seconds", 0.0)
        if self.memory_nbytes is not None:
            check_count("Hardware", "memory_nbytes", self.memory_nbytes)
        try:
            torch.device(self.device_type)
        except RuntimeError as error:
            raise wrong_value(
                "Hardware", "device_type", "a device type such as 'cuda' or 'cpu'", self.device_type
            ) from error

    def scaled(
        self,
        *,
        compute: float = 1.0,
        memory: float = 1.0,
        links: float = 1.0,
    ) -> Hardware:
        """Return a copy with scaled rates, for example by the fractions of the peaks that your
        kernels reach.

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
        """Return the figures as JSON values; ``from_values`` reads them."""
        flops = {str(dtype).removeprefix("torch."): rate for dtype, rate in self.flops.items()}
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"flops": flops}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Hardware:
        """Create a machine from the values that ``to_values`` returned.

        Raises:
            ConfigError: an unknown or missing name; an invalid figure.
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


UNTIMED = Hardware("", {FP32: math.inf}, math.inf, math.inf, math.inf, device_type="cpu")
"""Stands for the machine of a plan without times."""


def flops_of(machine: Hardware, dtype: torch.dtype) -> float:
    return machine.flops.get(dtype, machine.flops[FP32])


def seconds_of_kernel(
    machine: Hardware, nbytes: float, operations: float, dtype: torch.dtype
) -> tuple[float, float]:
    """Return a kernel's time (the larger of its compute and memory times), and its compute time."""
    computing = operations / flops_of(machine, dtype)
    return max(nbytes / machine.memory_bandwidth, computing), computing


def bandwidth_of(machine: Hardware, ranks: int, stride: int) -> float:
    """Return a rank's send bandwidth in rings whose ranks are ``stride`` apart. If a group spans
    nodes, NCCL divides the bytes among several rings, and each rank of a node is the gateway of one
    ring. A group with all 8 ranks of a node therefore uses 8 ports; a group with one rank per node
    (replicas) uses one port. A port of 400 Gb/s reaches 46 to 48 GB/s (NVIDIA/nccl-tests#290)."""
    if ranks * stride <= machine.ranks_per_node:
        return machine.near
    together = max(1, machine.ranks_per_node // stride)
    ports = ranks % together or together  # ports used on the node with the fewest ranks
    return min(machine.near, ports * machine.far)


def seconds_of(
    machine: Hardware,
    kind: str,
    nbytes: int,
    ranks: int,
    stride: int,
) -> float:
    """Return the time of a ring collective that runs alone, from the bytes of its larger buffer."""
    if ranks == 1 or nbytes == 0:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1  # an all-reduce sends everything twice
    sent = rounds * nbytes * (ranks - 1) / ranks
    hops = rounds * math.ceil(math.log2(ranks))
    return hops * machine.latency + sent / bandwidth_of(machine, ranks, stride)


_FILE = Path(__file__).with_name("hardware.json")
HARDWARE = {
    one["name"]: Hardware.from_values(one) for one in json.loads(_FILE.read_text(encoding="utf-8"))
}
"""Machines that ``plan`` accepts by name. For each device, the most common machine is first. The
latency of 3e-6 is from public NCCL tests of small messages, which took 2 to 10 us. Memory is as
torch reports it: 79.1 to 79.6 GiB for an A100 or H100 with "80 GB", depending on board and driver.
The minimum is from error messages of the CUDA allocator ("a total capacity of 79.11 GiB")."""


def hardware_for(found: object) -> Hardware | None:
    """Return the machine for a name, a ``Hardware``, or a file written by the doctor."""
    if found is None or isinstance(found, Hardware):
        return found
    if isinstance(found, os.PathLike) or (isinstance(found, str) and found.endswith(".json")):
        return _read(check_path("plan", "hardware", found))
    if not isinstance(found, str):
        expected = "a name, a file written by the doctor, a fsdp2.plans.Hardware or None"
        raise wrong_type("plan", "hardware", expected, found)
    # for each device, the most common machine is first, so "a100" selects the one with NVLink
    meant = [name for name in HARDWARE if name.startswith(f"{found.lower()}-")]
    name = found if found in HARDWARE else next(iter(meant), None)
    if name is None:
        known = ", ".join(sorted(HARDWARE))
        raise wrong_value("plan", "hardware", f"one of {known}, or a file from the doctor", found)
    return HARDWARE[name]


def _read(path: str) -> Hardware:
    """Read a machine from a file written by ``fsdp2 doctor --json``, or made with ``to_values``."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        hint = f"{type(error).__name__}: {error}"
        raise wrong_value("plan", "hardware", FILE, path, hint) from error
    figures = values.get("hardware", values) if isinstance(values, dict) else None
    if not isinstance(figures, dict) or "flops" not in figures:
        hint = "It has no measurements of a machine; run the doctor on two or more ranks."
        raise wrong_value("plan", "hardware", FILE, path, hint)
    return Hardware.from_values(figures)


def measure(name: str = "measured") -> Hardware:
    """Measure this machine: matmuls, copies, and all-gathers over all ranks.

    With a process group of several ranks, call this on every rank. All ranks return the same
    result: the rates of the slowest matmul, copy and link. On a single rank, links have infinite
    bandwidth. Takes about a second.

    Returns:
        A ``Hardware`` with equal ``near`` and ``far``, because one link over all ranks is measured.
    """
    device = torch.device(default_device_type())
    rates = [_product_rate(dtype, device) for dtype in (FP32, BF16, FP16)]
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = 2 * COPIED / _seconds(lambda: target.copy_(source), device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    latency, link = (0.0, math.inf) if ranks == 1 else _measure_link(ranks, device)
    if ranks > 1:  # all ranks need the same figures to get the same plans
        found = torch.tensor([*rates, copies], dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        *rates, copies = found.tolist()
    total = None
    module: Any = torch.get_device_module(device.type) if device.type != "cpu" else None
    if hasattr(module, "mem_get_info"):  # some device types lack this function
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
    """Return the latency of a hop and the bandwidth, from the slowest rank's time for each size."""
    took = []
    for nbytes in GATHERED:
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        received = [torch.empty_like(sent) for _ in range(ranks)]
        took.append(_seconds(lambda: dist.all_gather(received, sent), device))  # noqa: B023  # run now
    found = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    small, large = found.tolist()
    moved = (ranks - 1) * (GATHERED[1] - GATHERED[0])
    bandwidth = moved / max(large - small, 1e-9)
    hops = math.ceil(math.log2(ranks))
    return max(small - (ranks - 1) * GATHERED[0] / bandwidth, 0.0) / hops, bandwidth


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the minimum time of a few runs, after one warm-up run."""

    def complete() -> None:
        run()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize()

    return min(timeit.repeat(complete, number=1, repeat=REPEATS + 1)[1:])
