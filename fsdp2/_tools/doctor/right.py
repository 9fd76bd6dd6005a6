"""Is it right here: collectives, losses and gradients, replicas, checkpoints.

Owns these checks. Each compares what ranks did together with what this rank computes alone.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

import fsdp2
from fsdp2._core.base import torch_comm
from fsdp2._tools.doctor.fast import ODD, Model, batch, build, shard
from fsdp2._tools.doctor.ranks import Ranks, Values
from fsdp2._tools.doctor.verdicts import (
    NOT_MEASURED,
    OK,
    RIGHT,
    WARNING,
    WRONG,
    Check,
    Verdict,
    differing,
    ranks_text,
)

STEPS = 3
FP32, BF16 = 1e-4, 2.0**-6
"""How much a gradient may differ, over the largest value of its tensor.

In fp32 sums in another order differ by some roundings of 2**-24; three steps carry them on. In bf16
each rank's rows are computed alike on both sides, and a product that is rounded once more to 2**-8
may differ by that; four of them are allowed for. A wrong divisor or a lost rank makes it 0.5 or 1.
"""
PATTERN_NUMELS = (1, 1001, 1 << 18)


def _say(name: str, status: str, said: str) -> Verdict:
    return Verdict(RIGHT, name, status, said)


# Collectives.


def _pattern(numel: int, rank: int, device: torch.device, start: int = 0) -> Tensor:
    """Return small integers that differ by rank and place: sums of them are exact in fp32."""
    places = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    return ((places * 7 + rank * 131) % 251).to(torch.float32)


def _pattern_sum(numel: int, size: int, device: torch.device, start: int = 0) -> Tensor:
    total = torch.zeros(numel, dtype=torch.float32, device=device)
    for rank in range(size):
        total += _pattern(numel, rank, device, start)
    return total


def measure_collectives(ranks: Ranks) -> Values:
    """Send known integers, and note whose part arrives otherwise."""
    bad: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    size, rank, device = ranks.size, ranks.rank, ranks.device
    for numel in PATTERN_NUMELS if size > 1 else ():
        gathered = torch.empty(size * numel, dtype=torch.float32, device=device)
        torch_comm.all_gather_single(gathered, _pattern(numel, rank, device))
        for one, part in enumerate(gathered.chunk(size)):
            if not torch.equal(part, _pattern(numel, one, device)):
                bad["all_gather"].append(one)
        reduced = _pattern(numel, rank, device)
        dist.all_reduce(reduced)
        if not torch.equal(reduced, _pattern_sum(numel, size, device)):
            bad["all_reduce"].append(rank)
        scattered = torch.empty(numel, dtype=torch.float32, device=device)
        torch_comm.reduce_scatter_single(scattered, _pattern(size * numel, rank, device))
        if not torch.equal(scattered, _pattern_sum(numel, size, device, rank * numel)):
            bad["reduce_scatter"].append(rank)
    return {"bad": bad, "ranks": size}


def judge_collectives(found: Sequence[Values]) -> Iterator[Verdict]:
    if len(found) == 1:
        yield _say("collectives", NOT_MEASURED, "one rank sends nothing")
        return
    for kind in found[0]["bad"]:
        where = {rank: sorted(set(one["bad"][kind])) for rank, one in enumerate(found)}
        where = {rank: parts for rank, parts in where.items() if parts}
        if where:
            said = "; ".join(
                f"on rank {rank} the part of {ranks_text(parts)}" for rank, parts in where.items()
            )
            yield _say("collectives", WRONG, f"{kind} of known integers changes them: {said}")
    if not any(any(one["bad"].values()) for one in found):
        sizes = ", ".join(map(str, PATTERN_NUMELS))
        yield _say("collectives", OK, f"integers arrive as they were sent ({sizes} elements)")


# Losses and gradients.


def _losses_alone(model: Model, words: Tensor, parts: int, bf16: bool) -> Tensor:
    """Return the loss of the unsharded model on the batch of all ranks, and leave its gradients.

    In fp32 it is one batch; in bf16 each rank's rows are computed apart, as the ranks do.
    """
    if not bf16:
        loss = model(words)
        loss.backward()
        whole: Tensor = loss.detach()
        return whole
    losses = []
    for part in words.chunk(parts):
        lower = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        loss = functional_call(model, lower, part)
        loss.backward()  # adds up in fp32, as a reduction does
        losses.append(loss.detach())
    for param in model.parameters():
        _gradient(param).div_(parts)
    return torch.stack(losses).mean()


def _compare(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference over the largest value, and the factor between the two."""
    left, right = found.detach().double().cpu(), expected.detach().double().cpu()
    if not bool(left.isfinite().all()):
        return math.inf, math.nan
    scale = float(right.abs().max()) or 1.0
    ratio = float((left * right).sum() / (right * right).sum()) if float(right.abs().max()) else 1.0
    return float((left - right).abs().max()) / scale, ratio


def _train(
    ranks: Ranks, optimizer: Callable[..., torch.optim.Optimizer], mesh: Any, **how: bool
) -> Values:
    """Train sharded and alone; return the worst gradient, the losses, and what explains them."""
    alone, together = build(ODD, ranks.device), build(ODD, ranks.device)
    shard(together, mesh, **how)
    bf16 = how.get("bf16", False)
    steppers = [optimizer(alone.parameters()), optimizer(together.parameters())]
    worst, worst_name = 0.0, ""
    factors: list[float] = []
    losses: list[float] = []
    own: list[float] = []
    for step in range(STEPS):
        words = batch(ODD, ranks.size, ranks.device, step)
        expected = _losses_alone(alone, words, ranks.size, bf16)
        loss = together(words.chunk(ranks.size)[ranks.rank])
        loss.backward()
        mean = loss.detach().double().cpu()
        if ranks.size > 1:
            dist.all_reduce(mean)
        losses.append(abs(float(mean) / ranks.size - float(expected)) / abs(float(expected)))
        own.append(float(expected))
        references = dict(alone.named_parameters())
        for name, param in together.named_parameters():
            gradient: Any = param.grad
            difference, ratio = _compare(gradient.full_tensor(), _gradient(references[name]))
            if difference > worst:
                worst, worst_name = difference, f"{name}, step {step}"
            if step == 0:  # gradients of later ones differ because the parameters do
                factors.append(ratio)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    factor = factors[0] if max(factors) - min(factors) < 0.01 else math.nan
    return {
        "worst": worst, "where": worst_name, "factor": factor, "loss": max(losses), "alone": own,
    }  # fmt: skip


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _adamw(params: Any) -> torch.optim.Optimizer:
    # epsilon above the noise of a gradient, else rounding decides the sign of a step
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-3)


def _beside_torch(ranks: Ranks, **how: bool) -> Values:
    found: Values = {}
    mesh = ranks.mesh()
    for name, optimizer in (("SGD", _sgd), ("AdamW", _adamw)):
        found[name] = _train(ranks, optimizer, mesh, **how)
    try:
        found["torch"] = _train(ranks, _sgd, mesh, by_torch=True, **how)
    except Exception as error:  # of torch's own: nothing is wrong with what is asked about
        found["torch"] = {"refused": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return found


def measure_fp32(ranks: Ranks) -> Values:
    return _beside_torch(ranks)


def measure_bf16(ranks: Ranks) -> Values:
    return _beside_torch(ranks, bf16=True)


def _worst(found: Sequence[Values], name: str) -> Values:
    return max((one[name] for one in found), key=lambda v: (math.isnan(v["worst"]), v["worst"]))


def _explained(one: Values) -> str:
    factor = one["factor"]
    if math.isfinite(factor) and abs(factor - 1) > 0.1:
        return f"; they are {factor:.3g} times what they should be: a divisor, or a lost rank"
    return ""


def judge_training(found: Sequence[Values], name: str, tolerance: float) -> Iterator[Verdict]:
    """Tell ours from the unsharded model's, by optimizer, and beside torch's own."""
    peer = found[0].get("torch", {})
    peers = (
        _worst(found, "torch") if all("worst" in one.get("torch", {}) for one in found) else None
    )
    is_wrong = False
    for optimizer in ("SGD", "AdamW"):
        if optimizer not in found[0]:
            continue
        one = _worst(found, optimizer)
        lost = max(values[optimizer]["loss"] for values in found)
        if one["worst"] <= tolerance and lost <= tolerance:
            continue
        is_wrong = True
        also = ""
        if peers is not None:
            also = (
                ". torch's own is right, so it is fsdp2, or a hook on it"
                if peers["worst"] <= tolerance
                else ". torch's own differs too, so it is below both: the collectives, the devices"
            )
        yield _say(
            name,
            WRONG,
            f"with {optimizer} gradients differ by {one['worst']:.2g} of the largest "
            f"({one['where']}) and losses by {lost:.2g}, allowed {tolerance:.2g}"
            f"{_explained(one)}{also}",
        )
    if not is_wrong:
        one = max((_worst(found, o) for o in ("SGD", "AdamW") if o in found[0]),
                  key=lambda values: values["worst"])  # fmt: skip
        close = f" within {one['worst']:.1g}" if one["worst"] else ", to the bit"
        said = f"gradients of {STEPS} steps are the unsharded model's{close}"
        if peers is not None:
            said += f"; torch's own within {peers['worst']:.1g}"
        elif "refused" in peer:
            said += f"; torch's own not measured: {peer['refused']}"
        yield _say(name, OK, said)


def judge_alike(found: Sequence[Values]) -> Iterator[Verdict]:
    """Tell ranks whose unsharded model computes otherwise: the same rows, the same weights."""
    alone = [one["SGD"]["alone"] for one in found]
    groups = differing(alone)
    if len(groups) == 1:
        yield _say(
            "same arithmetic", OK, "every rank computes the unsharded model alike, to the bit"
        )
        return
    first = next(iter(groups.values()))[0]
    for others in list(groups.values())[1:]:
        apart = max(
            abs(mine - theirs) / abs(theirs)
            for mine, theirs in zip(alone[others[0]], alone[first], strict=True)
        )
        yield _say(
            "same arithmetic",
            WRONG if apart > 1e-6 else WARNING,
            f"{ranks_text(others)} computes the unsharded model otherwise than rank {first}, "
            f"by {apart:.1g}: another device, library or precision",
        )


def judge_fp32(found: Sequence[Values]) -> Iterator[Verdict]:
    yield from judge_training(found, "fp32", FP32)
    yield from judge_alike(found)


def judge_bf16(found: Sequence[Values]) -> Iterator[Verdict]:
    yield from judge_training(found, "bf16", BF16)


def measure_hsdp(ranks: Ranks) -> Values:
    """Train over replicas of shards: hosts and the ranks of one, or halves where it is asked."""
    hosts = len(set(ranks.hosts))
    if hosts > 1 and ranks.size % hosts == 0 and not ranks.options.hsdp:
        return {"shape": [hosts, ranks.size // hosts], **_hsdp(ranks, hosts)}
    if not ranks.options.hsdp:
        return {"skipped": "the ranks are on one host; --hsdp makes two groups of them"}
    if ranks.size < 4 or ranks.size % 2:
        return {"skipped": f"{ranks.size} ranks are not two groups of two or more"}
    return {"shape": [2, ranks.size // 2], **_hsdp(ranks, 2)}


def _hsdp(ranks: Ranks, replicas: int) -> Values:
    return {"SGD": _train(ranks, _sgd, ranks.mesh(replicas, ranks.size // replicas))}


def judge_hsdp(found: Sequence[Values]) -> Iterable[Verdict]:
    if "skipped" in found[0]:
        return [_say("HSDP", NOT_MEASURED, found[0]["skipped"])]
    replicas, shards = found[0]["shape"]
    return judge_training(found, f"HSDP {replicas} x {shards}", FP32)


# A checkpoint.


def measure_checkpoint(ranks: Ranks) -> Values:
    """Save and load, bits and all, in a folder that every rank has to see."""
    (name, *_) = ranks.exchange(f"fsdp2-doctor-{uuid.uuid4().hex[:8]}")
    folder = Path(ranks.options.folder).absolute() / name
    found: Values = {"folder": str(ranks.options.folder), "error_number": 0, "says": ""}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{ranks.rank}").write_bytes(os.urandom(1 << 16))
        found["free"] = shutil.disk_usage(folder).free
    except OSError as error:
        found |= {"error_number": error.errno or -1, "says": error.strerror or str(error)}
    could = ranks.exchange(found["error_number"] == 0)
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    found["unseen"] = [
        one for one, wrote in enumerate(could) if wrote and f"rank-{one}" not in there
    ]
    seen = ranks.exchange(not found["unseen"] and all(could))
    try:
        if all(seen):
            found |= _round_trip(ranks, folder / "checkpoint")
    finally:
        ranks.exchange("read")
        if ranks.rank == 0 or found["unseen"]:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _round_trip(ranks: Ranks, folder: Path) -> Values:
    mesh, models = ranks.mesh(), []
    for seed in (1, 2):
        model = build(ODD, ranks.device)
        shard(model, mesh)
        optimizer = _adamw(model.parameters())
        for step in range(seed):  # so that the second one has other values
            words = batch(ODD, ranks.size, ranks.device, step)
            model(words.chunk(ranks.size)[ranks.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append((model, optimizer))
    try:
        fsdp2.checkpoint.save(folder, *models[0])
        fsdp2.checkpoint.load(folder, *models[1])
    except OSError as error:
        return {"error_number": error.errno or -1, "says": error.strerror or str(error)}
    except fsdp2.FSDPError as error:  # what one rank met, told by all
        return {"error_number": -1, "says": str(error).partition("\n")[0]}
    saved, loaded = (fsdp2.checkpoint.local_state(*each) for each in models)
    return {"differing": sorted(_unlike(saved, loaded))}


def _unlike(left: Any, right: Any, name: str = "") -> Iterator[str]:
    """Yield the names of what differs in two states."""
    if isinstance(left, Tensor):
        if not torch.equal(left, right):
            yield name
    elif isinstance(left, dict):
        for key, value in left.items():
            yield from _unlike(value, right[key], f"{name}.{key}" if name else str(key))
    elif isinstance(left, list | tuple):
        for index, values in enumerate(zip(left, right, strict=True)):
            yield from _unlike(*values, f"{name}.{index}")
    elif left != right:
        yield name


def judge_checkpoint(found: Sequence[Values]) -> Iterator[Verdict]:
    folder = found[0]["folder"]
    failed = {rank: one for rank, one in enumerate(found) if one["error_number"]}
    if failed:
        first = next(iter(failed.values()))
        full = " The disk is full." if first["error_number"] == errno.ENOSPC else ""
        who = ranks_text(list(failed))
        yield _say(
            "checkpoint",
            WRONG,
            f"{who} cannot write to the folder {folder}: {first['says']}.{full}",
        )
        return
    blind = [rank for rank, one in enumerate(found) if one["unseen"]]
    if blind:
        yield _say(
            "checkpoint",
            WRONG,
            f"what other ranks write to {folder} is not seen by {ranks_text(blind)}: a checkpoint "
            "needs a folder that all ranks share (--checkpoint)",
        )
        return
    bad = sorted({name for one in found for name in one["differing"]})
    if bad:
        yield _say("checkpoint", WRONG, f"loaded with other bits: {', '.join(bad[:4])}")
    else:
        yield _say("checkpoint", OK, "saved, loaded into a new model, every bit the same")


CHECKS = (
    Check(RIGHT, "collectives", measure_collectives, judge_collectives),
    Check(RIGHT, "fp32", measure_fp32, judge_fp32),
    Check(RIGHT, "bf16", measure_bf16, judge_bf16),
    Check(RIGHT, "HSDP", measure_hsdp, judge_hsdp),
    Check(RIGHT, "checkpoint", measure_checkpoint, judge_checkpoint),
)
