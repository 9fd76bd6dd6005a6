"""Ops that copy a model, or take its state and load it. Run on a rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fsdp2
from tests.fuzz._pair import MismatchError, Pair
from tests.fuzz._program import Call, Copy, State


def copy_model(pair: Pair, op: Copy) -> None:
    if pair.is_unsynced or pair.is_whole:
        return
    pair.zero("model")
    pair.unhook()
    if op.how == "deepcopy":
        pair.model = copy.deepcopy(pair.model)
    else:
        pair.model = pickle.loads(pickle.dumps(pair.model))
    pair.make_optimizers()


def state(pair: Pair, op: State) -> None:
    if pair.is_unsynced or pair.is_whole:
        return
    pair.zero("model")
    pair.unhook()
    if pair.holds_whole:  # an error of its own, see update
        pair.make_optimizers()
    model, checkpoint = pair.model, fsdp2.checkpoint
    named = pair.optimizer if pair.has_named_state else None
    own = copy.deepcopy(pair.optimizer.state_dict())
    if op.how in ("torch", "assign"):
        taken = copy.deepcopy(model.state_dict())
        for name, value in pair.reference.state_dict().items():
            pair.same(taken[name], value, f"state: {name}")
        disturb(pair)
        model.load_state_dict(taken, assign=op.how == "assign")
        if op.how == "assign":
            pair.make_optimizers()
            return
        pair.optimizer.load_state_dict(own)
        return
    if op.how in ("full", "each"):
        on_all = op.how == "each"
        full = checkpoint.full_state(model, named, rank0_only=not on_all)
        if dist.get_rank() == 0 or on_all:
            check_full(pair, full)
        disturb(pair)
        checkpoint.load_full_state(model, full, named, from_rank0=not on_all)
    elif op.how == "sharded":
        sharded = copy.deepcopy(checkpoint.sharded_state(model, named))
        disturb(pair)
        checkpoint.load_sharded_state(model, sharded, named)
    else:
        local = copy.deepcopy(checkpoint.local_state(model, named))
        disturb(pair)
        checkpoint.load_local_state(model, local, named)
    if named is None:
        pair.optimizer.load_state_dict(own)


def check_full(pair: Pair, full: dict[str, Any]) -> None:
    """Compare a full state with those of the plain model and its optimizer."""
    expected = pair.reference.state_dict()
    if set(full["model"]) != set(expected):
        raise MismatchError(
            f"names of a full state differ\n{sorted(set(full['model']) ^ set(expected))}"
        )
    for name, value in expected.items():
        pair.same(full["model"][name], value, f"full state: {name}")
    if "optimizer" not in full:
        return
    names = [name for name, _ in pair.reference.named_parameters()]
    states = pair.reference_optimizer.state_dict()["state"]
    for key, values in states.items():
        found = full["optimizer"]["state"].get(names[key], {})
        for slot, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                pair.same(found[slot], value, f"full optimizer state: {names[key]} {slot}")


def disturb(pair: Pair) -> None:
    """Train the sharded model alone for a step."""
    call = Call()
    pair.run(pair.batch(call)[pair.index], call.ways_of(pair.index)).backward()
    pair.optimizer.step()
    pair.model.zero_grad()
