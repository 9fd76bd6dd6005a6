"""Machine checks that need timing: links, slow ranks, clocks, memory and copies to the device."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from fsdp2._core.base import torch_comm
from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.doctor.ranks import Ranks, Values
from fsdp2._tools.doctor.verdicts import (
    MACHINE,
    NOT_MEASURED,
    OK,
    WARNING,
    WRONG,
    Check,
    Verdict,
    ranks_text,
)

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes that each rank contributes to a timed collective."""
SIZES_OF_DEVICE = (*SIZES, 1 << 26)
PAIRED, SHIFTS = 1 << 22, 8
"""Bytes that a rank sends to each peer, and the maximum number of its peers."""
REPEATS = 5
SLOW, VERY_SLOW = 1.5, 2.5
"""Limits for a warning and an error about a slow rank, as multiples of the median time."""
SLOW_LINK, VERY_SLOW_LINK = 2.0, 4.0
CLOCK_S = 0.05
"""Clock difference, in seconds, above which timestamps of logs and files may be out of order."""
ALIGNED = 16
"""Size in bytes of an NCCL pack, which NCCL uses if every pointer is aligned to this size."""
_say = partial(Verdict, MACHINE)


def seconds_of(ranks: Ranks, run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the seconds that each run took, except the first. Ranks start each run together."""

    def complete() -> None:
        run()
        ranks.synchronize()

    return timeit.repeat(complete, ranks.barrier, number=1, repeat=repeats + 1)[1:]


def measure_links(ranks: Ranks) -> Values:
    """Time all-gathers and reduce-scatters over all ranks, by size."""
    found: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    sizes = SIZES_OF_DEVICE if ranks.is_large else SIZES
    for nbytes in sizes:
        part = torch.ones(nbytes // 4, dtype=torch.float32, device=ranks.device)
        whole = part.repeat(ranks.size)
        for kind, run in (
            ("all_gather", partial(torch_comm.all_gather_single, whole, part)),
            ("reduce_scatter", partial(torch_comm.reduce_scatter_single, part, whole)),
        ):
            found[kind].append(min(seconds_of(ranks, run)))
    return {"sizes": sizes, "seconds": found, "several_hosts": len(set(ranks.hosts)) > 1}


def judge_links(found: Sequence[Values]) -> Iterator[Verdict]:
    others = len(found) - 1
    for kind in found[0]["seconds"]:
        said = []
        for index, nbytes in enumerate(found[0]["sizes"]):
            seconds = max(one["seconds"][kind][index] for one in found)
            said.append(f"{nbytes_text(nbytes)} {others * nbytes / seconds / 1e9:.3g}")
        yield _say(f"bandwidth, {kind}", OK, f"GB/s by message size: {', '.join(said)}")


def measure_pairs(ranks: Ranks) -> Values:
    """Send to the ranks at distance 1, 2, ...; return the bytes per second from each source."""
    size, rank = ranks.size, ranks.rank
    rates: dict[str, float] = {}
    sent = torch.ones(PAIRED, dtype=torch.uint8, device=ranks.device)
    received = torch.empty_like(sent)
    for shift in range(1, min(size, SHIFTS + 1)):
        source, target = (rank - shift) % size, (rank + shift) % size
        times = []
        for _ in range(REPEATS):
            ranks.barrier()
            begun = time.perf_counter()
            *sends, receive = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, target), dist.P2POp(dist.irecv, received, source)]
            )
            receive.wait()  # wait only for the receive: the send may use another link
            ranks.synchronize()
            times.append(time.perf_counter() - begun)
            for work in sends:  # NCCL returns one work for both operations
                work.wait()
        rates[str(source)] = PAIRED / min(times)
    return {"rates": rates, "hosts": list(ranks.hosts)}


def judge_pairs(found: Sequence[Values]) -> Iterator[Verdict]:
    hosts = found[0]["hosts"]
    rates: dict[tuple[int, int], float] = {}
    for rank, one in enumerate(found):
        rates |= {(int(source), rank): rate for source, rate in one["rates"].items()}
    for is_near, where in ((True, "within a host"), (False, "between hosts")):
        same = {p: r for p, r in rates.items() if (hosts[p[0]] == hosts[p[1]]) is is_near}
        if same:
            yield from _judge_same(same, where, len(found))


def _judge_same(rates: dict[tuple[int, int], float], where: str, size: int) -> Iterator[Verdict]:
    usual = statistics.median(rates.values())
    slow = {pair: rate for pair, rate in rates.items() if rate * SLOW_LINK < usual}
    if not slow:
        low, high = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        said = f"{len(rates)} pairs {where}, {low:.3g} to {high:.3g} GB/s"
        yield _say("links", OK, said)
        return
    worst = min(slow.values())
    pairs = ", ".join(f"{source} to {target}" for source, target in sorted(slow)[:6])
    common = ""
    for index, word in enumerate(("from", "to")):
        (rank, *others) = {pair[index] for pair in slow}
        if not others and size > 2 and len(slow) == sum(pair[index] == rank for pair in rates):
            common = f": all links {word} rank {rank}"
    yield _say(
        "links",
        WRONG if worst * VERY_SLOW_LINK < usual else WARNING,
        f"slow {where}: {pairs} ({worst / 1e9:.3g} GB/s; median: {usual / 1e9:.3g} GB/s){common}",
    )


def measure_compute(ranks: Ranks) -> Values:
    size = 4096 if ranks.is_large else 384
    left = torch.ones(size, size, dtype=torch.float32, device=ranks.device)

    def products() -> None:
        for _ in range(4):
            left @ left

    return {"seconds": seconds_of(ranks, products, 4 * REPEATS)[REPEATS:]}


def judge_compute(found: Sequence[Values]) -> Iterator[Verdict]:
    """Find slow ranks by their lower quartiles, because noise lengthens only some of the times."""
    own = [statistics.quantiles(one["seconds"], n=4)[0] for one in found]
    usual = statistics.median(own)
    slow = {rank: mine / usual for rank, mine in enumerate(own) if mine > SLOW * usual}
    if len(own) == 2 and max(own) > SLOW * min(own):  # the median of two values is their mean
        slow = {own.index(max(own)): max(own) / min(own)}
    for rank, times in slow.items():
        yield _say(
            "slow rank",
            WRONG if times > VERY_SLOW else WARNING,
            f"rank {rank} takes {times:.2g} times as long as others for the same matrix products",
        )
    if not slow:
        said = f"the same matrix products take {min(own) * 1e3:.3g} to {max(own) * 1e3:.3g} ms"
        yield _say("slow rank", OK, said)


def measure_clocks(ranks: Ranks) -> Values:
    """Exchange clock readings with rank 0; keep the reading with the shortest round trip."""
    found: dict[str, list[float]] = {}
    asked = torch.zeros(1, dtype=torch.float64, device="cpu")
    for other in range(1, ranks.size):
        tries = []
        for _ in range(2 * REPEATS):
            if ranks.rank == 0:
                begun = time.time()
                dist.send(asked, other)
                dist.recv(asked, other)
                ended = time.time()
                tries.append((ended - begun, float(asked) - (begun + ended) / 2))
            elif ranks.rank == other:
                dist.recv(asked, 0)
                asked[0] = time.time()
                dist.send(asked, 0)
        if tries:
            found[str(other)] = list(min(tries))
    return {"offsets": found}


def judge_clocks(found: Sequence[Values]) -> Iterator[Verdict]:
    offsets = found[0]["offsets"]
    off = {int(rank): off for rank, (way, off) in offsets.items() if abs(off) > CLOCK_S + way}
    for rank, offset in off.items():
        said = f"the clock of rank {rank} differs from rank 0's by {offset:+.3g} s"
        yield _say("clocks", WARNING, f"{said}: do not compare their timestamps")
    if not off:
        most = max(abs(offset) for _, offset in offsets.values())
        yield _say("clocks", OK, f"within {most * 1e3:.2g} ms of rank 0's")


def measure_memory(ranks: Ranks) -> Values:
    """Measure the alignment of tensors, and the speed of host-to-device copies."""
    odd = [torch.empty(n, dtype=torch.uint8, device=ranks.device) for n in (1, 13, 1001, 100_003)]
    pointers = [tensor.data_ptr() for tensor in odd]
    found: Values = {"aligned": min(p & -p for p in pointers if p), "copies": {}}
    if ranks.device.type == "cuda":
        target = torch.empty(1 << 26, dtype=torch.uint8, device=ranks.device)
        for name in ("pinned", "pageable"):
            is_pinned = name == "pinned"
            source = torch.empty(1 << 26, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            copy = partial(target.copy_, source, non_blocking=True)
            found["copies"][name] = (1 << 26) / min(seconds_of(ranks, copy))
    return found


def judge_memory(found: Sequence[Values]) -> Iterator[Verdict]:
    bad = [rank for rank, one in enumerate(found) if one["aligned"] < ALIGNED]
    least = min(one["aligned"] for one in found)
    said = f"tensor addresses are multiples of {least} bytes"
    if bad:
        said += f" on {ranks_text(bad)}; collectives are slow below {ALIGNED}-byte alignment"
    yield _say("alignment", WARNING if bad else OK, said)
    if not found[0]["copies"]:
        yield _say("pinned copies", NOT_MEASURED, "requires a CUDA device")
        return
    pinned = min(one["copies"]["pinned"] for one in found) / 1e9
    pageable = min(one["copies"]["pageable"] for one in found) / 1e9
    said = f"{pinned:.3g} GB/s from pinned memory, {pageable:.3g} from pageable memory"
    yield _say("pinned copies", OK if pinned >= pageable else WARNING, said)


CHECKS = (
    Check(MACHINE, "clocks", measure_clocks, judge_clocks, ranks=2),
    Check(MACHINE, "slow rank", measure_compute, judge_compute, ranks=2),
    Check(MACHINE, "bandwidth", measure_links, judge_links, ranks=2),
    Check(MACHINE, "links", measure_pairs, judge_pairs, ranks=2),
    Check(MACHINE, "memory", measure_memory, judge_memory),
)
