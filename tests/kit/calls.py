"""Calls with one wrong argument, of everything public: made from the signatures.

`wrong_calls()` walks the names that `fsdp2` and its public submodules export, and the methods of
their classes, so a new name is called without a line here; where it needs an argument that none
has needed before, `RIGHT` asks for one. `World` has what the other arguments are, and says what a
call changed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import shutil
import tempfile
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import weights
from fsdp2._core.engine.tree import unit_of
from fsdp2.optim._local import LocalOptimizer

WIDTH = 5

# --- what is wrong --------------------------------------------------------------------------------


class Anything:
    """A class that takes any arguments."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


class Rude:
    """An object that raises when it is looked at."""

    def _raise(self, *args: object) -> Any:
        raise ArithmeticError

    __eq__ = __bool__ = __repr__ = __str__ = __hash__ = __float__ = __index__ = _raise
    __len__ = __fspath__ = __contains__ = _raise


def plain() -> nn.Module:
    """Make a module without drawing random numbers."""
    with torch.random.fork_rng(devices=[]):
        return nn.Linear(2, 2)


WRONG: dict[str, Callable[[], object]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "a float": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "2**70": lambda: 2**70,
    "10**5000": lambda: 10**5000,
    "a complex number": lambda: 1j,
    "a word": lambda: "x",
    "no word": lambda: "",
    "bytes": lambda: b"x",
    "NUL": lambda: "a\0b",
    "an object": object,
    "a rude object": Rude,
    "no list": list,
    "a list of None": lambda: [None],
    "a list of words": lambda: ["x", "y"],
    "no dict": dict,
    "a dict": lambda: {"x": 1},
    "a set": lambda: {1},
    "an iterator": lambda: iter([1, "x"]),
    "a function": lambda: lambda *args, **kwargs: None,
    "a class": lambda: Anything,
    "a class of modules": lambda: nn.Linear,
    "a plain module": plain,
    "a list of plain modules": lambda: nn.Sequential(plain()),
    "a tensor": lambda: torch.ones(2),
    "a number in a tensor": lambda: torch.tensor(3),
    "an array": lambda: numpy.ones(2),
    "a dtype of integers": lambda: torch.int64,
    "a dtype": lambda: torch.float64,
    "a device": lambda: torch.device("meta"),
    "a path": lambda: Path("x"),
}

SELDOM = {"inf", "10**5000", "a complex number", "NUL", "no list", "a list of words", "a dict"} | {
    "a set",
    "an iterator",
    "a class of modules",
    "a list of plain modules",
    "a number in a tensor",
    "an array",
    "a dtype",
    "a device",
}
TELLING = tuple(name for name in WRONG if name not in SELDOM)
"""Those that the default suite takes from; the pool tries all."""

# --- what is called -------------------------------------------------------------------------------

MADE_BY_CALLS = {  # results: nobody else makes them
    "Advice",
    "Collective",
    "Arrivals",
    "BitsRecording",
    "ClockOffset",
    "CompiledModel",
    "Figures",
    "GroupInfo",
    "GroupPlan",
    "IncompatibleKeys",
    "MemoryPoint",
    "OrderCheck",
    "ParamPlan",
    "Plan",
    "RecordedStep",
    "Recording",
    "Recordings",
    "SameBits",
    "SaveHandle",
    "ShardInfo",
    "StepPlan",
    "Verdict",
    "Suggestion",
    "UnitInfo",
    "GradientReductionHandle",
    "UnshardHandle",
}


@dataclass(frozen=True)
class Callee:
    """A public function, class or method, and the arguments that calls of it may have."""

    name: str
    owner: type | None
    parameters: tuple[inspect.Parameter, ...]

    @property
    def family(self) -> str:
        """What it belongs to: calls of one family are tried together."""
        first, *rest = self.name.split(".")
        if first in ("plans", "recordings"):  # each class by itself: their calls take seconds
            return rest[0]
        return first if self.owner is not None or first in SUBMODULES else "functions"


SUBMODULES = {
    name: value
    for name in dir(fsdp2)
    if not name.startswith("_") and isinstance(value := getattr(fsdp2, name), types.ModuleType)
}
MORE = {  # of calls with **kwargs
    "shard_model": fsdp2.fully_shard,
    "compile": torch.compile,
    "local": torch.optim.AdamW,
}
GIVEN_OTHERWISE = {"self", "module", "model", "params", "backend"}


def callees() -> Iterator[Callee]:
    """Yield everything public that can be called."""
    exported = [(name, getattr(fsdp2, name)) for name in fsdp2.__all__]
    exported.append(("fully_shard.state", fsdp2.fully_shard.state))
    for prefix, module in SUBMODULES.items():
        exported += [(f"{prefix}.{name}", getattr(module, name)) for name in module.__all__]
    exported.append(("optim.LocalOptimizer", LocalOptimizer))  # what `local` returns
    for name, value in exported:
        if not isinstance(value, type):
            yield Callee(name, None, _parameters(value))
            continue
        if issubclass(value, Exception) or inspect.isabstract(value):
            continue
        if value is fsdp2.GraphedStep:  # needs a device: tests/sim/test_graphs.py calls its methods
            continue
        is_made = value.__name__ in MADE_BY_CALLS or value in (fsdp2.FSDPModule, LocalOptimizer)
        if not is_made and value.__init__ is not object.__init__:
            yield Callee(name, None, _parameters(value))
        for method, function in _methods(value):
            yield Callee(f"{name}.{method}", value, _parameters(function)[1:])


def _methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that the package gives a class."""
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if not inspect.isfunction(value) or not value.__module__.startswith("fsdp2."):
                continue
            is_own = value.__qualname__.startswith(f"{base.__name__}.")
            if is_own and (not name.startswith("_") or name == "__call__"):
                yield name, value


def _parameters(function: Any) -> tuple[inspect.Parameter, ...]:
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and function.__name__ in MORE:
            more = inspect.signature(MORE[function.__name__]).parameters.values()
            found += [p for p in more if p.name not in GIVEN_OTHERWISE]
        elif parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            found.append(parameter)
    return tuple(found)


@dataclass(frozen=True)
class WrongCall:
    callee: Callee
    argument: str
    what: str

    def __str__(self) -> str:
        return f"{self.callee.name}({self.argument}={self.what})"


def wrong_calls(
    family: str | None = None, values: Collection[str] = tuple(WRONG)
) -> list[WrongCall]:
    """Return the calls of a family, or of all, with these values."""
    return [
        WrongCall(callee, parameter.name, what)
        for callee in callees()
        if family in (None, callee.family)
        for parameter in callee.parameters
        for what in values
    ]


def some_calls(family: str | None = None) -> list[WrongCall]:
    """Return the calls of the default suite: a third of the telling values for each argument.

    Their number is no multiple of three, so the next argument gets others.
    """
    assert len(TELLING) % 3
    return wrong_calls(family, TELLING)[::3]


FAMILIES = sorted({wrong.callee.family for wrong in wrong_calls()})

# --- what is right --------------------------------------------------------------------------------


class Gather(fsdp2.AllGather):
    """A collective of the user's."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inp(x)) * self.scale


RIGHT: dict[str, Callable[[World], object]] = {
    "Aligned.dim": lambda w: 0,
    "Box.name": lambda w: "0.weight",
    "Box.start": lambda w: (0, 0),
    "Box.shape": lambda w: (1, 1),
    "Cut.name": lambda w: "0.weight",
    "Files.rank": lambda w: 0,
    "begin.rank": lambda w: 0,
    "receive.rank": lambda w: 0,
    "send.rank": lambda w: 0,
    "buffer": lambda w: torch.ones(4, dtype=torch.uint8),
    "hardware": lambda w: fsdp2.plan.hardware["h100-nvlink-ib"],
    "Receiver.text": lambda w: w.engine_plan().to_json(),
    "Receiver.index": lambda w: 0,
    "receive.group": lambda w: weights.Files("engine", timeout=1.0),
    "Spec.shape": lambda w: (1,),
    "Spec.dtype": lambda w: torch.float32,
    "plan.destination": lambda w: w.destination(),
    "tensor_parallel.model_or_config": lambda w: w.model,
    "tensor_parallel.size": lambda w: 1,
    "tensor_parallel.rules": lambda w: {},
    "Owners.owners": lambda w: (0,),
    "Owners.costs": lambda w: (1.0,),
    "Owners.nbytes": lambda w: (4,),
    "from_owners.owners": lambda w: fsdp2.optim.plan_owners(w.tensors),
    "from_owners.whole": lambda w: fsdp2.optim.to_owners(
        w.tensors, fsdp2.optim.plan_owners(w.tensors)
    ),
    "to_owners.owners": lambda w: fsdp2.optim.plan_owners(w.tensors),
    "tensors": lambda w: w.tensors,
    "Hardware.name": lambda w: "mine",
    "Hardware.flops": lambda w: {torch.float32: 1e12},
    "Hardware.memory_bandwidth": lambda w: 1e12,
    "Hardware.near": lambda w: 1e9,
    "Hardware.far": lambda w: 1e9,
    "NeighbourCopies.name": lambda w: "calls",
    "Plan.html.path": lambda w: "page.html",
    "load_latest.folder": lambda w: ".",
    "async_op": lambda w: False,
    "cls": lambda w: torch.optim.AdamW,
    "comm": lambda w: Gather(),
    "device": lambda w: "cpu",
    "dtype": lambda w: torch.bfloat16,
    "enable": lambda w: True,
    "event": lambda w: torch.Event("cpu"),
    "factor": lambda w: 2.0,
    "folder": lambda w: "tensors",
    "fully_shard.module": lambda w: w.plain,
    "group": lambda w: dist.group.WORLD,
    "hook": lambda w: print,
    "keys": lambda w: "name",
    "load_full_state.state": lambda w: w.full,
    "load_local_state.state": lambda w: fsdp2.checkpoint.local_state(w.model, w.optimizer),
    "load_sharded_state.state": lambda w: fsdp2.checkpoint.sharded_state(w.model, w.optimizer),
    "max_bytes": lambda w: 1 << 20,
    "max_input_buffers": lambda w: 2,
    "max_norm": lambda w: 1.0,
    "memory": lambda w: "low",
    "keep": lambda w: True,
    "method_name": lambda w: "forward",
    "min_bytes": lambda w: None,
    "mode": lambda w: True,
    "model": lambda w: w.model,
    "module": lambda w: w.model,
    "modules": lambda w: [w.model],
    "name": lambda w: "FULL_SHARD",
    "optim_state": lambda w: w.full["optimizer"],
    "optimizer": lambda w: w.optimizer,
    "packed": lambda w: torch.ones(4),
    "parameters": lambda w: w.model.parameters(),
    "params": lambda w: w.model.parameters(),
    "path": lambda w: "saved",
    "placement": lambda w: Shard(0),
    "plan.mesh": lambda w: 2,
    "plan.model": lambda w: w.plain,
    "policy": lambda w: {nn.Linear},
    "ranks": lambda w: 2,
    "same_bits.a": lambda w: "bits",
    "same_bits.b": lambda w: "bits",
    "slots": lambda w: 4,
    "tensor": lambda w: torch.ones(2),
    "values": lambda w: [1.0, 2.0],
    "trace.path": lambda w: "trace.json",
    "rows.path": lambda w: "rows.jsonl",
    "html.path": lambda w: "page.html",
    "record.path": lambda w: tempfile.mkdtemp(dir="."),
    "reduced": lambda w: torch.ones(2),
    "reduction": lambda w: "sum",
    "shard": lambda w: "shard",
    "shard_model.model": lambda w: w.plain,
    "state": lambda w: {},
    "state_dict": lambda w: w.ema.state_dict(),
}
FLAGS = ("set_", "is_", "requires_", "reshard_", "unshard_", "reduce_scatter_")
ALWAYS = {  # arguments that have defaults, and are passed all the same
    "checkpoint.NeighbourCopies": {"memory": "memory"},
    "compile": {"backend": "eager"},
    "DataParallelMeshDims": {"shard": "shard"},
}
RECEIVERS: dict[type, Callable[[World], object]] = {
    fsdp2.FSDPModule: lambda w: w.model,
    fsdp2.CompiledModel: lambda w: fsdp2.compile(w.model, backend="eager"),
    fsdp2.Compress: lambda w: fsdp2.Compress(torch.bfloat16),
    fsdp2.plans.Hardware: lambda w: fsdp2.plan.hardware["h100-nvlink-ib"],
    fsdp2.plans.Plan: lambda w: fsdp2.plan(w.plain, mesh=2, batch=torch.zeros(2, WIDTH)),
    fsdp2.recordings.Recording: lambda w: w.record(),
    fsdp2.recordings.Recordings: lambda w: w.record().read(),
    fsdp2.UnshardHandle: lambda w: w.model.unshard(async_op=True),
    fsdp2.checkpoint.NeighbourCopies: lambda w: w.copies,
    fsdp2.checkpoint.SaveHandle: lambda w: w.handle,
    fsdp2.debug.BitsRecording: lambda w: fsdp2.debug.record_bits(w.model, "bits"),
    fsdp2.debug.OrderCheck: lambda w: fsdp2.debug.check_order(w.model),
    fsdp2.optim.EMA: lambda w: w.ema,
    weights.Figures: lambda w: w.engine_plan().figures,
    weights.Files: lambda w: w.files(),
    weights.Plan: lambda w: w.engine_plan(),
    weights.Receiver: lambda w: weights.Receiver(w.engine_plan().to_json(), 0),
    weights.SendHandle: lambda w: w.engine_plan().send(w.files(), background=True),
    LocalOptimizer: lambda w: w.optimizer,
}


class World:
    """What calls are given and may change; a folder that this process works in."""

    def __init__(self, rank: int, reads_files: bool) -> None:
        self._reads_files = reads_files
        shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(shared)
        self.folder = Path(shared[0])
        self._before = Path.cwd()
        os.chdir(self.folder)
        self.build()
        self._write_files()
        self.seen = self.look()

    def build(self) -> None:
        """Make everything anew."""
        torch.manual_seed(0)
        self.plain = Net()
        self.model: Any = Net()
        for module in (self.model.inp, self.model.out, self.model):
            fsdp2.fully_shard(module)
        self.model(torch.ones(2, WIDTH)).sum().backward()
        self.optimizer = fsdp2.optim.local(torch.optim.AdamW, self.model.parameters())
        self.optimizer.step()
        self.ema = fsdp2.optim.EMA(self.model)
        self.full = fsdp2.checkpoint.full_state(self.model, self.optimizer, rank0_only=False)
        self.seen = self.look()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def destination(self) -> list[dict[str, weights.Spec]]:
        """Return the layout of an engine of one rank that needs one weight."""
        shape = tuple(self.model.inp.weight.shape)
        box = weights.Box("inp.weight", (0, 0), shape)
        return [{"weight": weights.Spec(shape, torch.float32, boxes=[box])}]

    def files(self) -> weights.Files:
        transport = weights.Files("engine", timeout=0.1)
        transport.begin(dist.get_rank())
        return transport

    def engine_plan(self) -> weights.Plan:
        return weights.plan(self.model, self.destination())

    def _write_files(self) -> None:
        self.handle = fsdp2.checkpoint.save("saved", self.model, self.optimizer, background=True)
        self.handle.wait()
        self.copies = fsdp2.checkpoint.NeighbourCopies("calls", memory="memory")
        self.copies.save(self.model)
        self.copies.wait()
        fsdp2.checkpoint.save_safetensors("tensors", self.model)
        dist.barrier()

    def record(self) -> fsdp2.recordings.Recording:
        """Return a recording of a forward."""
        with fsdp2.record(self.model, tempfile.mkdtemp(dir=".")) as recording:
            self.model(torch.ones(2, WIDTH)).sum().backward()
        self.build()
        return recording

    def close(self) -> None:
        os.chdir(self._before)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder)

    def right(self, callee: Callee, parameter: inspect.Parameter) -> object:
        """Return a value for an argument that has no default."""
        last = callee.name.split(".")[-1]
        for key in (f"{last}.{parameter.name}", parameter.name):
            if key in RIGHT:
                return RIGHT[key](self)
        if parameter.name.startswith(FLAGS):
            return True
        raise AssertionError(
            f"tests/kit/calls.py: RIGHT needs a value for {callee.name}, {parameter}"
        )

    def call(self, wrong: WrongCall) -> None:
        """Do the call, and what it would be done for: enter a context, iterate to the end."""
        callee = wrong.callee
        given = dict(ALWAYS.get(callee.name, {}))
        for parameter in callee.parameters:
            if parameter.default is inspect.Parameter.empty and parameter.name != wrong.argument:
                given[parameter.name] = self.right(callee, parameter)
        given[wrong.argument] = WRONG[wrong.what]()
        if callee.owner is not None:
            function = getattr(RECEIVERS[callee.owner](self), callee.name.split(".")[-1])
        else:
            function = fsdp2
            for part in callee.name.split("."):
                function = getattr(function, part)
        _finish(function(**given))

    def look(self) -> dict[str, object]:
        """Return all that calls may change, in a form that can be compared."""
        seen: dict[str, object] = {}
        for title, top in (("plain", self.plain), ("model", self.model)):
            for name, module in top.named_modules():
                seen[f"{title}.{name}"] = _look_at(module)
        groups = self.optimizer.param_groups
        seen["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        seen["params"] = [id(p) for g in groups for p in g["params"]]
        state = self.optimizer.state
        seen["state"] = [{k: _bits(v) for k, v in state[p].items()} for p in state]
        seen["ema"] = (self.ema.updates, [_bits(v) for v in self.ema._averages.values()])
        if self._reads_files:  # what a thread writes is there, on every rank
            with contextlib.suppress(Exception):
                self.copies.wait()
            dist.barrier()
            found = [e for top, _, _ in os.walk(self.folder) for e in os.scandir(top)]
            seen["files"] = {e.path: (e.stat().st_size, e.stat().st_mtime_ns) for e in found}
            dist.barrier()  # nobody writes for the next call meanwhile
        seen["generator"] = bytes(torch.get_rng_state().numpy())
        seen["gradients"] = torch.is_grad_enabled()
        return seen


def _look_at(module: nn.Module) -> tuple[object, ...]:
    unit = unit_of(module)
    tensors = {**module._parameters, **module._buffers}
    attributes = {k: id(v) for k, v in vars(module).items() if not k.startswith("_fsdp2")}
    hooks = [(k, len(v)) for k, v in vars(module).items() if k.endswith("_hooks")]
    found: list[object] = [type(module), attributes, hooks, module.training]
    for name, tensor in tensors.items():
        if tensor is not None:
            found.append((name, id(tensor), tensor.requires_grad, _bits(tensor)))
            found.append(None if tensor.grad is None else (id(tensor.grad), _bits(tensor.grad)))
    if unit is not None:
        wires = [vars(group.wire) for group in unit.own_groups]
        found += [unit.settings, unit.precision.policy]
        found += [unit.post_optim_event, unit.summoned_on, unit.streams]
        found += [None if unit.runtime is None else unit.runtime.context.phase]
        found += [{k: id(v) if callable(v) else v for k, v in wire.items()} for wire in wires]
        found += [(g.reducer.hook, g.state if hasattr(g, "state") else None) for g in unit.groups]
    return tuple(found)


def _bits(value: object) -> object:
    if isinstance(value, DTensor):
        value = value._local_tensor
    return bytes(value.detach().numpy()) if isinstance(value, Tensor) else value


def _finish(result: Any) -> None:
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, nn.Module):
        with result:
            pass
    elif isinstance(result, Iterator):
        for _ in result:
            pass
    elif isinstance(
        result,
        fsdp2.UnshardHandle
        | fsdp2.GradientReductionHandle
        | fsdp2.checkpoint.SaveHandle
        | weights.SendHandle,  # or its thread's collectives meet those of the next call
    ):
        result.wait()
    elif isinstance(result, fsdp2.debug.OrderCheck):
        result.remove()
