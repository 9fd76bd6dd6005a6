"""Correctness checks: compare the combined results of all ranks with those of a single rank."""

from __future__ import annotations

import errno
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
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
"""Tolerances of gradients, relative to a tensor's largest value. In fp32, another summation order
causes a few rounding errors of 2**-24, which propagate through three steps. In bf16, both models
compute each rank's rows in the same way, but one model may round a product once more, by 2**-8;
four such roundings are allowed. A wrong divisor or a lost rank causes a difference of 0.5 or 1."""
PATTERN_NUMELS = (1, 1001, 1 << 18)
_say = partial(Verdict, RIGHT)


def _pattern(numel: int, rank: int, device: torch.device, start: int = 0) -> Tensor:
    """Return small integers that differ by rank and position; their sums are exact in fp32."""
    places = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    return ((places * 7 + rank * 131) % 251).to(torch.float32)


def _pattern_sum(
    numel: int,
    size: int,
    device: torch.device,
    start: int = 0,
) -> Tensor:
    return reduce(torch.add, (_pattern(numel, rank, device, start) for rank in range(size)))


def measure_collectives(ranks: Ranks) -> Values:
    """Send known integers, and record the ranks whose data arrives corrupted."""
    bad: dict[str, list[int]] = {"all_gather": [], "reduce_scatter": [], "all_reduce": []}
    size, rank, device = ranks.size, ranks.rank, ranks.device
    for numel in PATTERN_NUMELS:
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
    for kind in found[0]["bad"]:
        where = {rank: sorted(set(one["bad"][kind])) for rank, one in enumerate(found)}
        where = {rank: parts for rank, parts in where.items() if parts}
        if where:
            each = (f"on rank {r} the part of {ranks_text(parts)}" for r, parts in where.items())
            said = "; ".join(each)
            yield _say("collectives", WRONG, f"{kind} corrupts known integers: {said}")
    if not any(any(one["bad"].values()) for one in found):
        sizes = ", ".join(map(str, PATTERN_NUMELS))
        yield _say("collectives", OK, f"integers arrive unchanged ({sizes} elements)")


def _losses_alone(model: Model, words: Tensor, parts: int, bf16: bool) -> Tensor:
    """Return the unsharded model's loss on the batch of all ranks, and set its gradients. In bf16,
    compute each rank's rows separately, as the ranks do."""
    if not bf16:
        loss = model(words)
        loss.backward()
        whole: Tensor = loss.detach()
        return whole
    losses = []
    for part in words.chunk(parts):
        lower = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        loss = functional_call(model, lower, part)
        loss.backward()  # accumulates in fp32, as a reduction does
        losses.append(loss.detach())
    for param in model.parameters():
        _gradient(param).div_(parts)
    return torch.stack(losses).mean()


def _compare(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference, relative to the largest value, and the least-squares ratio."""
    left, right = found.detach().double().cpu(), expected.detach().double().cpu()
    if not bool(left.isfinite().all()):
        return math.inf, math.nan
    scale = float(right.abs().max()) or 1.0
    ratio = float((left * right).sum() / (right * right).sum()) if float(right.abs().max()) else 1.0
    return float((left - right).abs().max()) / scale, ratio


def _train(
    ranks: Ranks,
    optimizer: Callable[..., Any],
    mesh: Any,
    **how: bool,
) -> Values:
    """Train a sharded and an unsharded model; return how their gradients and losses differ."""
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
            if step == 0:  # later gradients differ because the parameters already differ
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


_sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# eps exceeds the gradients' rounding noise, which would otherwise determine an update's sign
_adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)


def measure_training(ranks: Ranks, **how: bool) -> Values:
    found: Values = {}
    mesh = ranks.mesh()
    for name, optimizer in (("SGD", _sgd), ("AdamW", _adamw)):
        found[name] = _train(ranks, optimizer, mesh, **how)
    try:
        found["torch"] = _train(ranks, _sgd, mesh, by_torch=True, **how)
    except Exception as error:  # a failure of torch's FSDP2 is not a finding about fsdp2
        found["torch"] = {"refused": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return found


def _worst(found: Sequence[Values], name: str) -> Values:
    return max((one[name] for one in found), key=lambda v: (math.isnan(v["worst"]), v["worst"]))


def judge_training(found: Sequence[Values], name: str, tolerance: float) -> Iterator[Verdict]:
    """Judge fsdp2's gradients per optimizer. Gradients of torch's FSDP2 narrow down the cause."""
    refused = found[0].get("torch", {}).get("refused")
    has_peer = all("worst" in one.get("torch", {}) for one in found)
    peer = _worst(found, "torch") if has_peer else None
    ours = {name: _worst(found, name) for name in ("SGD", "AdamW") if name in found[0]}
    is_wrong = False
    for optimizer, one in ours.items():
        lost = max(values[optimizer]["loss"] for values in found)
        if one["worst"] <= tolerance and lost <= tolerance:
            continue
        is_wrong = True
        also = scaled = ""
        factor = one["factor"]
        if math.isfinite(factor) and abs(factor - 1) > 0.1:
            scaled = f"; the factor of {factor:.3g} indicates a wrong divisor or a lost rank"
        if peer is not None:
            also = ". torch's FSDP2 is correct, so the cause is fsdp2 or a hook registered with it"
            if not peer["worst"] <= tolerance:
                also = ". torch's FSDP2 differs too: the cause is the collectives or the devices"
        yield _say(
            name,
            WRONG,
            f"with {optimizer}, gradients differ by {one['worst']:.2g} of the largest value "
            f"({one['where']}) and losses by {lost:.2g}; {tolerance:.2g} is allowed"
            f"{scaled}{also}",
        )
    if not is_wrong:
        worst = max(one["worst"] for one in ours.values())
        close = f" within {worst:.1g}" if worst else " bitwise"
        said = f"gradients of {STEPS} steps match the unsharded model's{close}"
        if peer is not None:
            said += f"; torch's FSDP2 within {peer['worst']:.1g}"
        elif refused is not None:
            said += f"; torch's FSDP2 not measured: {refused}"
        yield _say(name, OK, said)


def judge_alike(found: Sequence[Values]) -> Iterator[Verdict]:
    """Find ranks whose unsharded model gives different results for the same rows and weights."""
    alone = [one["SGD"]["alone"] for one in found]
    groups = differing(alone)
    if len(groups) == 1:
        yield _say("same arithmetic", OK, "the unsharded model gives the same bits on every rank")
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
            f"losses of the unsharded model on {ranks_text(others)} differ from those on rank "
            f"{first} by {apart:.1g}; the cause is another device, library or precision",
        )


judge_bf16 = partial(judge_training, name="bf16", tolerance=BF16)


def judge_fp32(found: Sequence[Values]) -> Iterator[Verdict]:
    yield from judge_training(found, "fp32", FP32)
    yield from judge_alike(found)


def measure_hsdp(ranks: Ranks) -> Values:
    """Train with HSDP: one replica per host, or two replicas with ``--hsdp``."""
    replicas = 2 if ranks.options.hsdp else ranks.hosts_alike
    if replicas == 1:
        return {"skipped": "all ranks are on one host; --hsdp divides them into two replicas"}
    if ranks.options.hsdp and (ranks.size < 4 or ranks.size % 2):
        return {"skipped": f"{ranks.size} ranks cannot form two equal replicas of at least 2 ranks"}
    shape = [replicas, ranks.size // replicas]
    return {"shape": shape, "SGD": _train(ranks, _sgd, ranks.mesh(*shape))}


def judge_hsdp(found: Sequence[Values]) -> Iterable[Verdict]:
    if "skipped" in found[0]:
        return [_say("HSDP", NOT_MEASURED, found[0]["skipped"])]
    replicas, shards = found[0]["shape"]
    return judge_training(found, f"HSDP {replicas} x {shards}", FP32)


def measure_checkpoint(ranks: Ranks) -> Values:
    """Save to a shared folder, load from it, and compare every bit."""
    (name, *_) = ranks.exchange(f"fsdp2-doctor-{uuid.uuid4().hex[:8]}")
    folder = ranks.options.checkpoint.absolute() / name
    found: Values = {"folder": str(ranks.options.checkpoint), "error_number": 0, "says": ""}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{ranks.rank}").write_bytes(os.urandom(1 << 16))
        found["free"] = shutil.disk_usage(folder).free
    except OSError as error:
        found |= {"error_number": error.errno or -1, "says": error.strerror or str(error)}
    could = ranks.exchange(found["error_number"] == 0)
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    wrote = [rank for rank, has_written in enumerate(could) if has_written]
    found["unseen"] = [rank for rank in wrote if f"rank-{rank}" not in there]
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
        for step in range(seed):  # different numbers of steps give the models different values
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
    except fsdp2.FSDPError as error:  # every rank raises this error
        return {"error_number": -1, "says": str(error).partition("\n")[0]}
    saved, loaded = (fsdp2.checkpoint.local_state(*each) for each in models)
    return {"differing": sorted(_unlike(saved, loaded))}


def _unlike(left: Any, right: Any, name: str = "") -> Iterator[str]:
    """Yield the names of values that differ between two states."""
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
    blind = [rank for rank, one in enumerate(found) if one["unseen"]]
    if failed:
        first = next(iter(failed.values()))
        full = " The disk is full." if first["error_number"] == errno.ENOSPC else ""
        who = ranks_text(list(failed))
        said = f"{who} cannot write to the folder {folder}: {first['says']}.{full}"
    elif blind:
        said = (
            f"files that other ranks write to {folder} are not visible to {ranks_text(blind)}: a "
            "checkpoint needs a folder that all ranks share (--checkpoint)"
        )
    elif bad := sorted({name for one in found for name in one["differing"]}):
        said = f"loaded values differ from the saved ones: {', '.join(bad[:4])}"
    else:
        yield _say("checkpoint", OK, "state saved and loaded into a new model is bitwise equal")
        return
    yield _say("checkpoint", WRONG, said)


CHECKS = (
    Check(RIGHT, "collectives", measure_collectives, judge_collectives, ranks=2),
    Check(RIGHT, "fp32", measure_training, judge_fp32),
    Check(RIGHT, "bf16", partial(measure_training, bf16=True), judge_bf16),
    Check(RIGHT, "HSDP", measure_hsdp, judge_hsdp),
    Check(RIGHT, "checkpoint", measure_checkpoint, judge_checkpoint),
)
