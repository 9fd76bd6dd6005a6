"""What each op of a program does to a `Pair`. Runs on a rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fsdp2
from tests.fuzz._failing_ops import diverge, fail
from tests.fuzz._layers import Net, Ways
from tests.fuzz._pair import Losses, MismatchError, Pair, loss_of
from tests.fuzz._program import (
    Backward,
    Call,
    Clip,
    Compiled,
    Copy,
    Diverge,
    Evaluate,
    Fail,
    Forward,
    Freeze,
    Functional,
    Hook,
    NewOptimizer,
    Op,
    Replace,
    Reshard,
    Set,
    State,
    Unshard,
    Update,
    Whole,
    Write,
    Zero,
)
from tests.fuzz._sharding import innermost
from tests.fuzz._state_ops import copy_model, state
from tests.kit.meshes import DEVICE
from tests.kit.parity import names_of


def backward(pair: Pair, op: Backward) -> None:
    for tree in pair.model.trees:
        tree.set_requires_gradient_sync(op.sync != "no")
        if op.sync == "shard":
            tree.set_requires_all_reduce(False)
    stays_whole = pair.is_whole and op.root >= 0
    forward = pair.penalized if op.how == "penalty" else pair.forward
    losses = [forward(call, op.root) for call in op.calls]
    pair.is_whole = True  # after a forward it may be, as it was asked to
    for inner in op.between:
        PERFORM[type(inner)](pair, inner)
        pair.is_whole = True
    if op.how in ("sum", "penalty"):
        losses = [Losses(*(sum(each, torch.zeros(())) for each in zip(*losses, strict=True)))]
    elif op.how == "reversed":
        losses = losses[::-1]
    for loss, expected in losses:
        for again in (True, False) if op.how == "retain" else (False,):
            loss.backward(retain_graph=again)
            expected.backward(retain_graph=again)
    entered = {op.root} if op.root >= 0 else set(range(len(pair.model.trees)))
    pair.unsynced = pair.unsynced - entered if op.sync == "yes" else pair.unsynced | entered
    pair.is_whole = stays_whole
    if pair.program.model.hides != "no" and pair.lacks_gradients():
        pair.optimizer.step()  # raises, as nobody reduced these gradients


def forward(pair: Pair, op: Forward) -> None:
    pair.forward(op.call, op.root)


def update(pair: Pair, op: Update) -> None:
    if len(pair.unsynced) == len(pair.model.trees):
        return  # the sharded model steps when these are reduced
    if pair.unsynced:
        update_without_the_unsynced(pair)
        return
    if pair.holds_whole:
        try:
            pair.optimizer.step()
        except fsdp2.StateError:  # it says so, rather than to train nothing
            pair.reshard()
            pair.make_optimizers()
            pair.optimizer.step()
    else:
        pair.optimizer.step()
    pair.reference_optimizer.step()
    if op.zero != "keep":
        pair.zero({"none": "optimizer"}.get(op.zero, op.zero))


def update_without_the_unsynced(pair: Pair) -> None:
    """Step while gradients of some roots wait: it goes on without them, and says so."""
    if pair.holds_whole:  # what an optimizer was made of then is refused
        pair.reshard()
        pair.make_optimizers()
    for index in pair.unsynced:
        if any(p.grad is not None for p in pair.model.trees[index].parameters()):
            return  # of a backward before: it would be used
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pair.optimizer.step()
    waiting = [p for i in pair.unsynced for p in pair.reference.trees[i].parameters()]
    kept = [p.grad for p in waiting]
    if any(grad is not None for grad in kept) and not any("FS710" in str(w.message) for w in told):
        raise MismatchError("an optimizer stepped, and did not tell of gradients that wait")
    for param in waiting:
        param.grad = None
    pair.reference_optimizer.step()
    for param, grad in zip(waiting, kept, strict=True):
        param.grad = grad


def zero(pair: Pair, op: Zero) -> None:
    pair.zero("model")


def evaluate(pair: Pair, op: Evaluate) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    parts = pair.batch(op.call)
    ways = op.call.ways_of(pair.index)
    pair.model.eval()
    with modes[op.mode]():
        actual = pair.run(parts[pair.index], ways).clone()
    pair.model.train()
    with torch.no_grad():
        expected = pair.run_reference(parts[pair.index], ways)
    pair.same(actual.clone(), expected, "evaluation")


def freeze(pair: Pair, op: Freeze) -> None:
    if pair.is_unsynced or pair.is_whole:
        return  # refused (a StateError), or a toggle of whole parameters
    found, expected = list(pair.model.parameters()), list(pair.reference.parameters())
    index = op.param % len(found)
    names = [name for name, _ in pair.reference.named_parameters()]
    if names[index].endswith("gain"):
        return  # so that each rank has something to train
    if pair.program.model.gain == "last":
        return  # what it is given needs a gradient on all ranks or none: docs/differences.md
    pair.zero("model")
    for params in (found, expected):
        params[index].requires_grad_(op.trainable)


def unshard(pair: Pair, op: Unshard) -> None:
    for unit in units_at(pair.model, op.layer):
        handle = unit.unshard(async_op=op.asynchronous)
        if handle is not None and op.layer % 2:
            handle.wait()
        if handle is None:
            prefix = {id(m): name for name, m in pair.model.named_modules()}[id(unit)]
            expected = dict(pair.reference.named_parameters(remove_duplicate=False))
            for name, param in unit.named_parameters(prefix, recurse=False):
                if not isinstance(param, DTensor):
                    pair.same(param.detach().to(expected[name].dtype), expected[name], "unshard")
        pair.is_whole = True


def reshard(pair: Pair, op: Reshard) -> None:
    """Reshard one unit; -1: all of them."""
    if op.layer < 0:
        pair.reshard()
        return
    for unit in units_at(pair.model, op.layer):
        unit.reshard()


def units_at(model: Net, layer: int) -> list[Any]:
    """Return the unit of a layer, or those of all roots."""
    layers = model.layers()
    found: list[nn.Module] = list(model.trees)
    if layer >= 0:
        chosen = layers[layer % len(layers)]
        found = [chosen, innermost(chosen.body)]
    return [module for module in found if isinstance(module, fsdp2.FSDPModule)]


def look_at_whole(pair: Pair, op: Whole) -> None:
    if op.how == "full_params":
        found = fsdp2.full_params(pair.model, max_bytes=200)
        pair.assert_whole(((name, tensor) for name, tensor in found), "full_params")
        return
    with fsdp2.summon_full_params(pair.model, writeback=op.write):
        pair.assert_whole(iter(pair.model.named_parameters()), "summon_full_params")
        if op.write:
            for model in (pair.model, pair.reference):
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.75)


def new_optimizer(pair: Pair, op: NewOptimizer) -> None:
    pair.make_optimizers()


def change_setting(pair: Pair, op: Set) -> None:
    """Change a setting; the settings of gradients are of whole trees."""
    model = pair.model
    roots: list[Any] = list(model.trees)
    chosen = units_at(model, op.layer) or roots
    if op.name == "reshard_after_forward":
        for unit in chosen:
            unit.set_reshard_after_forward(op.value)
            pair.keeps_whole |= not op.value
    elif op.name == "reshard_after_backward":
        for unit in chosen:
            unit.set_reshard_after_backward(op.value)
            pair.keeps_whole |= not op.value
    elif op.name == "reduction":
        if pair.is_unsynced:
            return
        for root in roots:
            root.set_gradient_reduction(op.value)
        divisor = {"mean": pair.count, "sum": 1}.get(op.value, op.value)
        pair.scale = pair.count / divisor
    elif op.name == "unused":
        for root in roots:
            root.set_reduce_scatter_unused_params(op.value)
        pair.zeros_if_unused = pair.zeros_if_unused or op.value
    elif op.name == "prefetch":
        units = [layer for layer in model.layers() if isinstance(layer, fsdp2.FSDPModule)]
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + op.value])
            unit.set_modules_to_backward_prefetch(units[:index][::-1][: op.value])
    else:
        for unit in roots if op.name == "set_memory" else chosen:
            getattr(unit, op.name)(op.value)


def replace_parameter(pair: Pair, op: Replace) -> None:
    if pair.is_unsynced or pair.is_whole:
        return
    pair.zero("model")
    pair.unhook()
    name = list(names_of(pair.reference))[op.param % len(names_of(pair.reference))]
    param, expected = names_of(pair.model)[name], names_of(pair.reference)[name]
    assert isinstance(param, DTensor)
    with torch.no_grad():
        if op.how == "copy":
            param.mul_(0.5)
        elif op.how == "local":
            param.to_local().mul_(0.5)
        else:
            if any(p is expected for n, p in names_of(pair.reference).items() if n != name):
                return  # tied: the other name keeps the old one
            if "tensor" in (param.device_mesh.mesh_dim_names or ()):
                return  # a plain tensor cannot take its place, and it says so
            owner, _, last = name.rpartition(".")
            new = nn.Parameter(expected.detach() * 0.5, requires_grad=expected.requires_grad)
            setattr(pair.model.get_submodule(owner), last, new)
            pair.is_whole = True  # until the next forward takes it over
        expected.mul_(0.5)
    if op.how == "new":
        disturb_nothing(pair)
        pair.make_optimizers()


def disturb_nothing(pair: Pair) -> None:
    """Run a forward, in which the model takes over what was put there."""
    evaluate(pair, Evaluate())
    pair.is_whole = False


WRITE: dict[str, Callable[[list[Tensor]], Any]] = {
    "data": lambda params: [p.data.mul_(0.5) for p in params],
    "local": lambda params: [local(p).data.mul_(0.5) for p in params],
    "numpy": lambda params: [np.multiply(a := local(p).numpy(), 0.5, out=a) for p in params],
    "foreach": lambda params: torch._foreach_mul_(params, 0.5),
    "ema": lambda params: get_ema_multi_avg_fn(0.0)(params, [p.detach() * 0.5 for p in params], 0),
}
"""Ways to halve parameters, most of which change no version that autograd counts."""


def write(pair: Pair, op: Write) -> None:
    if pair.is_unsynced or pair.is_whole or (op.how == "numpy" and DEVICE != "cpu"):
        return
    with torch.no_grad():
        WRITE[op.how](list(pair.model.parameters()))
        for expected in pair.reference.parameters():
            expected.mul_(0.5)
    if pair.keeps_whole:
        pair.reshard()  # what stays because it was asked for does not see such a write


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def clip(pair: Pair, op: Clip) -> None:
    if pair.is_unsynced or pair.is_whole:
        return
    norm = fsdp2.clip_grad_norm_(pair.model.parameters(), op.max_norm)
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), op.max_norm)
    pair.same(norm.double(), expected.double(), "norm")


def functional(pair: Pair, op: Functional) -> None:
    if pair.is_unsynced or pair.is_whole or (pair.setup.by_dims and DEVICE != "cpu"):
        return  # as for `compiled`: DTensors on the data axes are redistributed by them
    call = Call()
    parts = pair.batch(call)
    x, ways = parts[pair.index], call.ways_of(pair.index)
    if op.how == "grad":
        functional_grad(pair, x)
        return
    for tree in pair.model.trees:
        tree.set_requires_gradient_sync(True)

    def values(model: nn.Module) -> dict[str, Tensor]:
        factor = 1.0 if op.how == "own" else 0.5
        named = dict(model.named_parameters())
        return named if factor == 1.0 else {name: p * factor for name, p in named.items()}

    loss = loss_with(pair.model, values(pair.model), x, ways)
    halves = values(pair.reference)
    losses = [
        loss_with(pair.reference, halves, part, call.ways_of(r)) for r, part in enumerate(parts)
    ]
    pair.same(loss, losses[pair.index], "loss")
    loss.backward()
    pair.mean(losses).backward()


def loss_with(model: Net, values: dict[str, Tensor], x: Tensor, ways: Ways) -> Tensor:
    return loss_of(model, x, ways, call=lambda *args: functional_call(model, values, args))


def functional_grad(pair: Pair, x: Tensor) -> None:
    values = {name: p.detach() * 0.5 for name, p in pair.reference.named_parameters()}

    def loss(model: Net) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda given: loss_with(model, given, x, {})

    actual = torch.func.grad(loss(pair.model))(values)
    expected = torch.func.grad(loss(pair.reference))(values)
    for name, gradient in expected.items():
        pair.same(actual[name], gradient, "torch.func.grad")


def compiled(pair: Pair, op: Compiled) -> None:
    if pair.is_unsynced or pair.is_whole or pair.setup.offload or DEVICE != "cpu":
        return  # gloo has no functional collectives on a device
    parts, ways = pair.batch(op.call), op.call.ways_of(pair.index)

    def call(x: Tensor, *_: Any) -> Tensor:
        for tree in pair.model.trees:
            x = fsdp2.compile(tree, disable=True)(x, ways)
        return x

    loss = loss_of(pair.model, parts[pair.index], ways, call=call)
    expected = pair.expected(parts, op.call, loss)
    loss.backward()
    expected.backward()


def hook(pair: Pair, op: Hook) -> None:
    if pair.is_unsynced or pair.is_whole:
        return
    if pair.hooks:
        pair.unhook()
        return
    for model in (pair.model, pair.reference):
        params = [p for p in model.parameters() if p.requires_grad]
        doubled = params[op.param % len(params)].register_hook(lambda gradient: gradient * 2)
        pair.hooks.append(doubled)


PERFORM: dict[type[Op], Callable[[Pair, Any], None]] = {
    Backward: backward,
    Update: update,
    Zero: zero,
    Fail: fail,
    Evaluate: evaluate,
    Freeze: freeze,
    Copy: copy_model,
    State: state,
    Unshard: unshard,
    Reshard: reshard,
    Whole: look_at_whole,
    NewOptimizer: new_optimizer,
    Set: change_setting,
    Replace: replace_parameter,
    Clip: clip,
    Functional: functional,
    Compiled: compiled,
    Hook: hook,
    Forward: forward,
    Write: write,
    Diverge: diverge,
}
