"""Promise: the engine's own tensors do not see modes that the user is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fsdp2
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES
from tests.kit.parity import Pair, assert_sharded
from tests.kit.pool import ranks
from tests.kit.slow import with_slow


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("mode", with_slow(MODES, ["meta", "inference", "autocast"]))
@ranks(2)
def test_around_fully_shard(mode: str) -> None:
    for name in ("stack", "few_rows"):
        pair = around(name, MODES[mode])
        assert_sharded(pair.model)
        pair.train(steps=2)


def around(name: str, mode: Callable[[], AbstractContextManager[Any]]) -> Pair:
    """Return a pair whose model was built as usual, and sharded inside of the mode."""
    pair = Pair(name)
    model = CASES[name].build()
    model.load_state_dict(pair.reference.state_dict())
    with mode():
        for unit in CASES[name].units(model):
            fsdp2.fully_shard(unit)
        fsdp2.fully_shard(model)
    pair.model = model
    pair.optimizer, pair.reference_optimizer = pair._optimizers()
    return pair


@pytest.mark.parametrize("mode", ["float64", "bfloat16"])  # torch has no backward under meta
@ranks(2)
def test_around_training(mode: str) -> None:
    """Also what the engine makes later: stamps, gradients, the exchange of ranks."""
    pair = around("stack", nullcontext)
    batches = [pair.batch() for _ in range(3)]
    for batch in batches:
        expected = pair.run_reference(batch)
        expected.backward()
        local = pair.local(batch)
        with MODES[mode]():
            pair.run(pair.model, local).backward()
        pair.step()
    pair.check()


@ranks(2)
def test_the_idiom_for_large_models() -> None:
    """Built, sharded and listed in one `with torch.device("meta")`."""
    pair = Pair("stack")
    with torch.device("meta"):
        model = CASES["stack"].build()
        for unit in CASES["stack"].units(model):
            fsdp2.fully_shard(unit)
        fsdp2.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer
    model.to_empty(device=DEVICE)
    for own, other in zip(model.parameters(), pair.model.parameters(), strict=True):
        with torch.no_grad():
            own.copy_(other)
    pair.model = model
    pair.optimizer, _ = pair._optimizers()
    pair.train(steps=2)
