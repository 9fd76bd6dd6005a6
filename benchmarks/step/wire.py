"""Bytes that gloo ranks send in a step, over the least that they could.

    python -m benchmarks.step.wire

Two and three processes on this machine train over TCP, and each adds up what the kernel counts as
sent on its own sockets (`tcpi_bytes_sent` less `tcpi_bytes_retrans`: payload, without headers), so
other traffic on the loopback interface does not disturb. The limit a rank is
(N-1)/N (b_p (2P - P_k) + b_r P), see `_limits`. DDP sends 2 (N-1)/N b_r P at least, which is less:
it gathers nothing. Needs Linux 4.19 or newer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import stat
import struct

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.kit.limits import sharded_bytes_sent
from benchmarks.kit.models import MEDIUM, PRECISION_NAMES, PRECISIONS, applies, prepare_step
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run

WARMUP = 3
STEPS = 2
BYTES_SENT_AT = 200  # offset of tcpi_bytes_sent in Linux's struct tcp_info; bytes_retrans follows
Variants = list[tuple[str, str]]


def measure(arguments: argparse.Namespace) -> Measured:
    variants: Variants = [
        (library, precision)
        for precision in PRECISIONS
        for library in arguments.libraries
        if library != "plain" and applies(library, precision)
    ]
    figures = []
    for ranks in arguments.world_sizes:
        per_rank = run_on_ranks(count_sent, ranks, variants)
        for index, (library, precision) in enumerate(variants):
            limit = sharded_bytes_sent(MEDIUM, ranks, b_p=2 if precision == "bf16" else 4)
            sent = sum(counts[index] for counts in per_rank) / ranks
            case = f"{PRECISION_NAMES[precision]}, N={ranks}"
            figures += [
                Figure(case, library, "MB a rank", sent / 1e6, gated(library)),
                Figure(case, library, "sent / limit", sent / limit, gated(library)),
            ]
    return Measured(figures, {"numel": MEDIUM.numel, "steps": STEPS})


def count_sent(rank: int, world_size: int, variants: Variants) -> list[float]:
    """Return the bytes this rank sent in a step of each variant."""
    mesh = init_device_mesh("cpu", (world_size,))
    counts = []
    for library, precision in variants:
        step = prepare_step(library, MEDIUM, mesh, bf16=precision == "bf16")
        for _ in range(WARMUP):
            step()
        dist.barrier()
        before = bytes_sent()
        for _ in range(STEPS):
            step()
        dist.barrier()  # a few hundred bytes; after it no rank has anything left to send
        counts.append((bytes_sent() - before) / STEPS)
    return counts


def bytes_sent() -> int:
    """Return what this process sent over its open TCP sockets so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, sent_again = struct.unpack_from("QQ", info, BYTES_SENT_AT)
            total += sent - sent_again
    return total


if __name__ == "__main__":
    parser = make_parser("wire", __doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3], metavar="N")
    run("wire", __doc__, measure, parser)
