"""Values on 2, 3 and 4 ranks of one GPU, beside an unsharded model and torch's own.

Features that never ran on a device come first, then every model with every setting.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from benchmarks.gpu import _machine
from benchmarks.gpu._ranks import Worlds
from benchmarks.gpu._rows import Rows, Skipped
from fsdp2 import checkpoint
from fsdp2._core.base import torch_dtensor
from fsdp2.optim import _offload as offloaded_states
from tests.behaviour import test_aligned_shards as aligned
from tests.behaviour import test_owned_shards as owned
from tests.behaviour.test_divergence import Paths
from tests.behaviour.test_gather_codes import FP8, reference_step
from tests.behaviour.test_offload import MODELS as OFFLOADED
from tests.kit import parity
from tests.kit.engine import BF16, engine_layout, update_an_engine
from tests.kit.models import CASES, Block, loss_of, seeded
from tests.kit.parity import (
    ROWS,
    Pair,
    assert_same,
    assert_same_gradients,
    make_mesh,
    names_of,
    shard,
    train_alike,
    whole,
)

NEAR = 1e-5
FP32 = torch.float32


def near(case: str = "stack", **kwargs: Any) -> Pair:
    """Return a pair whose sums may round as a GPU's products do."""
    pair = Pair(case, **kwargs)
    pair.first_rtol = pair.later_rtol = max(NEAR, pair.later_rtol or 0.0)
    return pair


def train(case: str, **kwargs: Any) -> None:
    near(case, **kwargs).train(3)


def accumulate(**kwargs: Any) -> None:
    """Three steps of four micro-batches, all but the last without gradient sync."""
    pair = near(**kwargs)
    for _ in range(3):
        for micro in range(4):
            pair.model.set_requires_gradient_sync(micro == 3)  # type: ignore[operator]
            pair.backward(scale=0.25)
        pair.step()
    pair.check()


def on_2_x_2(**kwargs: Any) -> None:
    accumulate(mesh=make_mesh(2, 2), **kwargs)


def dealt(choose: Callable[[nn.Parameter], Any]) -> None:
    if not torch_dtensor.asks_subclasses():
        raise Skipped("this torch asks no subclass of DTensor; 2.12 does")
    for case in REHEARSED if _machine.REHEARSES else ("stack", "few_rows", "tied_lm", "scalars"):
        train(case, shard_placement_fn=choose)


def loaded_first(folder: Path) -> None:
    """Load owned parameters as the first operation of all: pairs of ranks send."""
    if not torch_dtensor.asks_subclasses():
        raise Skipped("this torch asks no subclass of DTensor; 2.12 does")
    case = CASES["stack"]
    model = shard(seeded(case.build), case, shard_placement_fn=owned.matrices)
    checkpoint.save(folder / "saved", model)
    other = shard(seeded(case.build, 7), case, shard_placement_fn=owned.matrices)
    checkpoint.load(folder / "saved", other)
    for name, param in names_of(model).items():
        assert torch.equal(whole(param), whole(names_of(other)[name])), name


def coded_gathers() -> None:
    for name in ("stack", "non_contiguous"):
        case = CASES[name]
        policy = fsdp2.MixedPrecisionPolicy(gather_dtype=FP8)
        model, plain = shard(seeded(case.build), case, mp_policy=policy), seeded(case.build)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, plain)]
        for _ in range(3):
            batch = case.batch(ROWS)
            own = batch.chunk(dist.get_rank(), dist.get_world_size())
            loss_of(model(*own.args, **own.kwargs)).backward()
            reference_step(plain, batch)
            for key, param in plain.named_parameters():
                grad = names_of(model)[key].grad
                if param.grad is not None and grad is not None:
                    assert_same(whole(grad), param.grad, key, 1e-4, NEAR)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def coded_gradients(dtype: torch.dtype, most: float, shape: tuple[int, ...] = ()) -> str:
    """Sums of eight steps are near the exact ones, and nearer with feedback."""
    sums: dict[str, dict[str, Tensor]] = {}
    for way, hook in {
        "exact": None,
        "coded": fsdp2.Compress(dtype, block=16),
        "fed back": fsdp2.Compress(dtype, block=16, error_feedback=True),
    }.items():
        case = CASES["stack"]
        model = shard(seeded(case.build), case, mesh=make_mesh(*shape))
        if hook is not None:
            fsdp2.register_comm_hook(model, hook)
        torch.manual_seed(3)
        batch = case.batch(ROWS).chunk(dist.get_rank(), dist.get_world_size())
        total: dict[str, Tensor] = {}
        for _ in range(8):
            loss_of(model(*batch.args, **batch.kwargs)).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                total[name] = total.get(name, torch.zeros(())) + whole(param.grad)
            model.zero_grad()
        sums[way] = total
    worst = {
        way: max(
            float((value - sums["exact"][name]).abs().max() / sums["exact"][name].abs().max())
            for name, value in sums[way].items()
        )
        for way in ("coded", "fed back")
    }
    assert 0 < worst["coded"] < most, worst
    assert worst["fed back"] < 0.7 * worst["coded"], worst
    return f"off by {worst['coded']:.1e}, {worst['fed back']:.1e} fed back"


def muon() -> None:
    """`optim.whole` steps each matrix as Muon steps it in one process."""
    case = CASES["few_rows"]
    model, plain = shard(seeded(case.build), case), seeded(case.build)
    ours = {n: p for n, p in names_of(model).items() if p.dim() == 2}
    theirs = {n: p for n, p in names_of(plain).items() if p.dim() == 2}
    optimizers = (
        fsdp2.optim.whole(torch.optim.Muon, list(ours.values()), lr=0.1),
        torch.optim.Muon(list(theirs.values()), lr=0.1),
    )
    for step in range(3):
        torch.manual_seed(step)
        for name, param in theirs.items():
            param.grad = torch.randn_like(param)
            own: Any = ours[name]
            own.grad = distribute_tensor(param.grad, own.device_mesh, own.placements)
        for optimizer in optimizers:
            optimizer.step()
    for name, param in theirs.items():
        assert_same(whole(ours[name]), param.detach(), name, NEAR)


def local_fused() -> None:
    def make(params: Any, lr: float) -> Any:
        params, options = list(params), {"lr": 0.02, "eps": 1e-4, "fused": True}
        if any(isinstance(param, DTensor) for param in params):
            return fsdp2.optim.local(torch.optim.AdamW, params, **options)
        return torch.optim.AdamW(params, **options)

    pair = near(optimizer=make)
    pair.later_rtol = 1e-4  # AdamW divides small gradients by small ones
    pair.train(4)


def trained_alone(steps: int, prepare: Callable[[Any, Any], None]) -> list[Tensor]:
    """Train in bf16 with AdamW on shards; return the shards in the end."""
    case = CASES["stack"]
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, FP32)
    model = shard(seeded(case.build), case, mp_policy=policy)
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.02)
    prepare(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        batch = case.batch(4)
        loss_of(model(*batch.args, **batch.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def changes_nothing(prepare: Callable[[Any, Any], object]) -> None:
    with mock.patch.object(offloaded_states, "LEAST_NBYTES", 1):
        found = trained_alone(5, prepare)  # type: ignore[arg-type]
    expected = trained_alone(5, lambda model, optimizer: None)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


def shards_on_the_host() -> None:
    for case in OFFLOADED:
        pair = near(case, offload_policy=fsdp2.CPUOffloadPolicy())
        pair.train(3)


def saved_in_the_background(folder: Path) -> str:
    """Steps go on meanwhile; what is loaded is the moment of the call."""
    case = CASES["stack"]

    def make(seed: int) -> tuple[nn.Module, Any]:
        model = shard(seeded(case.build, seed), case)
        return model, fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any) -> None:
        batch = case.batch(4)
        loss_of(model(*batch.args, **batch.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(1)
    step(model, optimizer)
    wanted = {name: param.to_local().clone() for name, param in names_of(model).items()}  # type: ignore[operator]
    began = time.monotonic()
    handle = checkpoint.save(folder / "saved", model, optimizer, background=True)
    blocked = time.monotonic() - began
    for _ in range(3):
        step(model, optimizer)
    handle.wait()
    other, its = make(2)
    step(other, its)
    checkpoint.load(folder / "saved", other, its)
    for name, param in names_of(other).items():
        assert torch.equal(param.to_local(), wanted[name]), name  # type: ignore[operator]
    step(other, its)
    return f"blocked {blocked * 1e3:.0f} ms"


def conditional_units() -> None:
    """The first rank runs a block that the others leave out."""
    model, plain = seeded(Paths), seeded(Paths)
    for unit in (model.a, model.b, model.c):
        fsdp2.fully_shard(unit, mesh=make_mesh(), conditional=True)
    fsdp2.fully_shard(model, mesh=make_mesh())
    size = dist.get_world_size()
    paths = ["abc", *["ac"] * (size - 1)]
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(size, 2, 8)
        model(x[dist.get_rank()], paths[dist.get_rank()]).square().sum().backward()
        sum(plain(x[r], paths[r]).square().sum() / size for r in range(size)).backward()  # type: ignore[union-attr]
        assert_same_gradients(model, plain, NEAR)
        for one in (model, plain):
            one.zero_grad()


def to_an_engine(kind: str, trainers: int) -> str:
    """`weights`: the first ranks update an engine of the others; see ``tests.kit.engine``."""
    engines = dist.get_world_size() - trainers
    return update_an_engine(kind, trainers, engine_layout(engines, BF16))


def fails_in_backward() -> None:
    pair = near()

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    handle = pair.model.blocks[1].register_forward_hook(  # type: ignore[union-attr, index]
        lambda module, given, output: output.register_hook(fail) and None
    )
    batch = pair.local(pair.batch())
    try:
        pair.run(pair.model, batch).backward()
        raise AssertionError("no exception came out")
    except ArithmeticError:
        handle.remove()
    pair.model.zero_grad()
    pair.train(3)


def ranks_differ() -> str:
    """Every rank gets an error, and soon."""
    model = seeded(Paths)
    for unit in (model.a, model.b, model.c, model):
        fsdp2.fully_shard(unit, mesh=make_mesh())
    path = "abc" if dist.get_rank() == 0 else "ac"
    began = time.monotonic()
    try:
        for _ in range(6):
            model(torch.randn(2, 8), path).square().sum().backward()
            if not _machine.REHEARSES:
                torch.cuda.synchronize()
    except fsdp2.StateError as error:
        return f"{time.monotonic() - began:.1f} s: {str(error)[-6:]}"
    raise AssertionError("no error came")


def beside_torch(case: str, **kwargs: Any) -> None:
    if not CASES[case].in_torch:
        raise Skipped("torch's own refuses this model")
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, FP32)
    train_alike(CASES[case], mp_policy=policy, **kwargs)


def plain(work: Callable[[], Any]) -> Callable[[Path], Any]:
    return partial(_without_folder, work)


def _without_folder(work: Callable[[], Any], folder: Path) -> Any:
    with mock.patch.dict(parity.TOLERANCE, {FP32: NEAR}):
        return work()


def states(model: Any, optimizer: Any, most: int | None) -> None:
    fsdp2.optim.offload_states(optimizer, max_bytes=most)


def activations(model: Any, optimizer: Any) -> None:
    fsdp2.offload_activations(model, {Block}, min_bytes=1, keep_last=0)


INT8, E4M3 = torch.int8, torch.float8_e4m3fn
NEW: dict[str, Callable[[Path], Any]] = {
    "Whole, loaded first": loaded_first,
    'shard="optimizer"': plain(partial(accumulate, shard="optimizer")),
    'shard="gradients"': plain(partial(accumulate, shard="gradients")),
    "Whole matrices": plain(partial(dealt, owned.matrices)),
    "Aligned rows": plain(partial(dealt, aligned.blocks)),
    "Aligned elements": plain(partial(dealt, aligned.elements)),
    "Whole, Aligned and rows": plain(partial(dealt, aligned.mixed)),
    "fp8 gathers": plain(coded_gathers),
    "Compress int8": plain(partial(coded_gradients, INT8, 0.05)),
    "Compress fp8": plain(partial(coded_gradients, E4M3, 0.2)),
    "optim.whole, Muon": plain(muon),
    "optim.local, fused": plain(local_fused),
    "offload_states": plain(partial(changes_nothing, partial(states, most=None))),
    "offload_states, max_bytes": plain(partial(changes_nothing, partial(states, most=4096))),
    "offload_activations": plain(partial(changes_nothing, activations)),
    "CPUOffloadPolicy": plain(shards_on_the_host),
    "background save, loaded": saved_in_the_background,
    "conditional units": plain(conditional_units),
    "exception in a backward": plain(fails_in_backward),
    "ranks differ": plain(ranks_differ),
}
THREE = {"weights, 2 trainers to 1": plain(partial(to_an_engine, "rows", 2))}
FOUR: dict[str, Callable[[Path], Any]] = {
    "weights, 2 trainers (TP 2) to TP 2": plain(partial(to_an_engine, "tp", 2)),
    "weights, 1 trainer to TP 3": plain(partial(to_an_engine, "rows", 1)),
    "shard_outer": plain(partial(on_2_x_2, shard_outer="optimizer")),
    "hpZ, accumulation": plain(partial(accumulate, reshard_after_forward=2)),
    "2 x 2, accumulation": plain(on_2_x_2),
    "2 x 2, Compress int8": plain(partial(coded_gradients, INT8, 0.05, (2, 2))),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    'shard="optimizer"': {"shard": "optimizer"},
}
AFRESH = {"Whole, loaded first", "ranks differ"}
REHEARSED = ("stack", "few_rows")


def questions() -> list[tuple[int, str, Callable[[Path], Any]]]:
    kinds = REHEARSED if _machine.REHEARSES else tuple(CASES)
    sizes = (2, 3)
    found = [(size, name, work) for size in sizes for name, work in NEW.items()]
    if _machine.REHEARSES:  # the code of each is the same on three
        found = found[: len(NEW)]
    found += [(3, name, work) for name, work in THREE.items()]
    found += [(4, name, work) for name, work in FOUR.items()]
    for title, how in SETTINGS.items():
        found += [(3, f"{kind}, {title}", plain(partial(train, kind, **how))) for kind in kinds]
    found += [
        (2, f"{kind} beside torch's", plain(partial(beside_torch, kind)))
        for kind in ("stack", *(kind for kind in kinds if kind != "stack"))
    ]
    return found


def main() -> None:
    rows, worlds = Rows(), Worlds()
    limit = 60.0 if _machine.REHEARSES else 25.0

    def ask(size: int, name: str, work: Callable[[Path], Any]) -> dict[str, Any]:
        answers = worlds.ask(size, work, min(limit, rows.seconds_left), name in AFRESH)
        return {"note": copy.copy(answers[0]) or ""}

    for size, name, work in questions():
        rows.ask(f"{size} ranks", name, partial(ask, size, name, work))
    worlds.close()
    rows.end()


if __name__ == "__main__":
    main()
