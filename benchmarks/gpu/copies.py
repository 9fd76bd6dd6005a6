"""What copies beside collectives cost: when parameters travel alone, in how many pieces, aligned.

Kernel times are sums over one profiled step of four 8B blocks, with emulated collectives of 8
ranks. What NCCL does with pieces and rows is asked on two ranks that share the GPU: they meet over
sockets, so only differences between ways mean something.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu import _machine
from benchmarks.gpu._ranks import Worlds
from benchmarks.gpu._rows import Rows, Skipped
from benchmarks.gpu._steps import BLOCKS_8B, emulated, make_step, size_of, warm_up
from benchmarks.kit.rounds import rotate
from fsdp2._core.base import capabilities, torch_comm
from fsdp2._core.base.capabilities import Capabilities, ZeroCopy
from fsdp2._core.params import buffers, layout, planning

KIB = 1024
THRESHOLDS = {"64 KiB": 64 * KIB, "512 KiB": 512 * KIB, "4 MiB": 4096 * KIB, "none": None}
ROWS_NBYTES = (16, 128)
PIECES = (1, 2, 4, 8, 16, 32)
ROUNDS = 1 if _machine.REHEARSES else 9


def with_threshold(nbytes: int | None) -> Any:
    """Let parameters of so many bytes a rank travel alone; None: none does."""

    def zero_copy(self: Capabilities, ranks: int) -> ZeroCopy | None:
        return None if nbytes is None else ZeroCopy(nbytes * ranks, capabilities.ROW_NBYTES)

    return mock.patch.object(Capabilities, "zero_copy", zero_copy)


def steps_by_threshold() -> list[dict[str, Any]]:
    return _compare({name: [with_threshold(most)] for name, most in THRESHOLDS.items()})


def steps_by_rows() -> list[dict[str, Any]]:
    return _compare(
        {
            f"{nbytes} bytes": [
                mock.patch.object(module, "ROW_NBYTES", nbytes)
                for module in (layout, planning, buffers)
            ]
            for nbytes in ROWS_NBYTES
        }
    )


def _compare(ways: dict[str, list[Any]]) -> list[dict[str, Any]]:
    with emulated(8) as mesh:
        steps = {}
        for name, patches in ways.items():
            for patch in patches:
                patch.start()
            try:  # layouts are made at the first step
                steps[name] = warm_up(make_step("fsdp2", size_of(BLOCKS_8B), mesh), 3)
            finally:
                mock.patch.stopall()
        times = rotate(
            ROUNDS,
            {n: lambda s=s: _machine.time_once(s).device_ms for n, s in steps.items()},  # type: ignore[misc]
        )
        rows = [
            {
                "way": name,
                "step ms": sorted(times[name])[ROUNDS // 2],
                "peak GB": _machine.find_peak(step) / _machine.GB,
                **_machine.kernel_ms(_machine.profiled(step)),
            }
            for name, step in steps.items()
        ]
        steps.clear()
    _machine.empty()
    return rows


def gather_in_pieces(folder: Path) -> list[dict[str, Any]]:
    """Gather the same bytes in one NCCL group of more and more pieces."""
    if _machine.REHEARSES:
        raise Skipped("gloo takes no group of collectives")
    return [
        {"pieces": count, "bytes a rank": total, "ms": _time_gather(total // count, count, 0)}
        for total in (256 * KIB, 16384 * KIB)
        for count in PIECES
    ]


def gather_from_rows(folder: Path) -> list[dict[str, Any]]:
    """Gather rows that begin at a multiple of 128, 16 or 2 bytes."""
    total = 64 * KIB if _machine.REHEARSES else 16384 * KIB
    return [
        {"rows at": f"{offset or 128} bytes", "ms": _time_gather(total + offset, 1, offset)}
        for offset in (0, 16, 2)
    ]


def _time_gather(nbytes: int, count: int, offset: int) -> float:
    group: Any = dist.group.WORLD
    size = dist.get_world_size()
    device = _machine.device()
    sent = [torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(count)]
    got = [
        torch.empty(offset // 2 + size * len(one), dtype=torch.bfloat16, device=device)[
            offset // 2 :
        ]
        for one in sent
    ]

    def gather() -> None:
        with torch_comm.coalesced(group, device):
            for output, source in zip(got, sent, strict=True):
                dist.all_gather_into_tensor(output, source)

    return _machine.median_ms(gather, ROUNDS)


def casts_in_a_lane() -> list[dict[str, Any]]:
    """Cast and pack a block's gradients beside products, in compute's stream or in one beside."""
    size = size_of(BLOCKS_8B)
    device = _machine.device()
    shapes = [(size.width, size.width)] * 4 + [(size.hidden, size.width)] * 3
    grads = [torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    packed = torch.empty(sum(grad.numel() for grad in grads), device=device)
    parts = [
        part.view(s)
        for part, s in zip(packed.split([g.numel() for g in grads]), shapes, strict=True)
    ]
    left = torch.ones(size.tokens, size.width, dtype=torch.bfloat16, device=device)
    lane = _machine.side_stream()

    def cast() -> None:
        torch._foreach_copy_(parts, grads)

    def compute() -> None:
        for grad in grads[4:]:
            (left @ grad.t()) @ grad

    def behind() -> None:
        cast()
        compute()

    def beside() -> None:
        with _machine.beside(lane):
            cast()
        compute()
        _machine.join(lane)

    ways = {"the casts alone": cast, "the products alone": compute, "one stream": behind}
    ways["a lane beside"] = beside
    return [{"way": name, "ms": _machine.median_ms(way, ROUNDS)} for name, way in ways.items()]


def main() -> None:
    rows, worlds = Rows(), Worlds()
    # before the parent touches CUDA: ranks are forked
    for what, question in (("pieces", gather_in_pieces), ("rows", gather_from_rows)):
        rows.ask(what, "NCCL, 2 ranks", partial(_first, worlds, question))
    worlds.close()
    _machine.need_a_gpu()
    with torch.no_grad():
        rows.ask("casts", "casts of one block", casts_in_a_lane)
    rows.ask("threshold", "travels alone from", steps_by_threshold, 10.0)
    rows.ask("alignment", "rows of", steps_by_rows, 6.0)
    rows.end()


def _first(worlds: Worlds, question: Any) -> Any:
    return worlds.ask(2, question, 25.0)[0]


if __name__ == "__main__":
    main()
