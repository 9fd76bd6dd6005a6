"""``python -m fsdp2 plan``: a plan from a shell, of a model of one's own or of a known shape.

Owns its command line: the words, what is said of a wrong one before anything large runs, and what
is said while something long does. It must not know how a plan is made or a page drawn.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from fsdp2._core.base.names import class_name, in_terminal
from fsdp2._core.base.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2._tools.plan import setup, shapes
from fsdp2._tools.plan.hardware import HARDWARE, Hardware, hardware_for
from fsdp2._tools.plan.plan import Plan, plan, search_of, table_of

MARK = "_fsdp2_is_unit"
"""In the ``__dict__`` of modules that become units: a plan is made of a copy, which keeps it."""

PLAN = """\
examples:
  python -m fsdp2 plan my_model:build --mesh 64 --policy Block
  python -m fsdp2 plan my_model:build --mesh 8x64 --policy Block --batch 4x4096:int64 \\
      --param-dtype bfloat16 --optimizer AdamW --html plan.html
"""
WANTED = "name a function without arguments that returns one, or a class that needs none"
TENSOR = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
ASSUMED = "h100-nvlink-ib"
"""The machine of who names none: a verdict needs one, and most who ask have its like."""
LENGTH = 4096
"""Tokens of a sequence of who names none, for a model of a known shape."""
KNOWN = f"known shapes: {', '.join(shapes.SHAPES)}\nknown hardware: {', '.join(HARDWARE)}\n"
SECONDS_OF_A_MODULE = 0.012
"""What planning takes for each module without parts, on the slow side: for the first estimate."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 plan",
        description="Tell whether a sharded model fits, how fast a step is, and what takes memory.",
        epilog=PLAN + KNOWN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        help="package.module:name of a function without arguments, or a class; a known shape, as "
        "llama3-8b; or a Hugging Face config.json",
    )
    add(
        "--mesh",
        required=True,
        type=_mesh,
        help="32: all 32 ranks share the model; 4x8: 8 ranks share it, and there are 4 replicas",
    )
    units = parser.add_mutually_exclusive_group()
    units.add_argument("--policy", metavar="CLASSES", help="classes of units: Block,Embedding")
    units.add_argument("--units", metavar="PATTERNS", help="names of units: 'blocks.*,head'")
    add(
        "--batch",
        help="of one rank: shapes as 4x128:int64[,...], or module:function; for a known shape also "
        f"sequences alone, as 4, of {LENGTH} tokens",
    )
    add("--memory", help="low, balanced, fast, or a size as 2GiB")
    add("--param-dtype", type=_dtype, metavar="DTYPE", help="of compute, for example bfloat16")
    add("--reduce-dtype", type=_dtype, metavar="DTYPE", help="of reductions")
    add("--optimizer", metavar="NAME", help="of torch.optim, or module:name")
    add(
        "--hardware",
        metavar="NAME",
        help=f"a known machine, as h100; a doctor's file; or cpu, for ranks on CPUs ({ASSUMED})",
    )
    for part, what in (("compute", "rates of products"), ("links", "bandwidths of links")):
        add(
            f"--{part}",
            type=float,
            metavar="SHARE",
            help=f"what part of the hardware's {what} yours reach, as 0.6",
        )
    add("--budget", metavar="SIZE", help="as 70GB, in place of the hardware's memory; suggests")
    add("--suggest", action="store_true", help="say which settings fit, the best first")
    add("--offload", action="store_true", help="keep shards in the memory of the host")
    for what in ("activations", "states"):
        add(f"--offload-{what}", action="store_true", help=f"fsdp2's offload_{what}, on a device")
    add(
        "--activation-checkpointing",
        action="store_true",
        help="compute activations of units again in backward",
    )
    add("--loss-chunks", type=int, metavar="N", help="count logits as if made in so many parts")
    add("--advice", action="store_true", help="say what is wrong, and what would be better")
    add("--rank", type=int, default=0, help="whose shards and memory are told (0)")
    add("--html", metavar="FILE", help="write a page with pictures")
    return parser


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Make the plan and print it, what decides first."""
    try:
        shape = shapes.shape_for(given.model)
    except ValueError as error:
        parser.error(f"model: {error}")
    if shape is None and ":" not in given.model:
        parser.error(
            f"model: expected package.module:name, found {given.model!r}; there are shapes of the "
            f"names {', '.join(shapes.SHAPES)}, and a config.json is read"
        )
    if shape is None:
        model = _build(parser, given.model)
    else:
        with torch.device("meta"):
            model = shapes.Decoder(shape)
        _complete(parser, given)
    policy = _mark_units(parser, model, given)
    keywords: dict[str, Any] = {
        "mesh": given.mesh,
        "policy": policy,
        "batch": _batch(parser, given.batch),
        "memory": _memory(given.memory),
        "optimizer": _optimizer(parser, given.optimizer),
        "hardware": _hardware(parser, given),
        "rank": given.rank,
        "activation_checkpointing": given.activation_checkpointing,
        "loss_chunks": given.loss_chunks,
        "offload_activations": given.offload_activations,
        "offload_states": given.offload_states,
    }
    if given.param_dtype is not None or given.reduce_dtype is not None:
        keywords["mp_policy"] = MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
    if given.offload:
        keywords["offload_policy"] = CPUOffloadPolicy()
    with setup.listening(_Reporter(model)):
        found = plan(model, **{k: v for k, v in keywords.items() if v is not None})
        _tell(found, given)


def _hardware(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str | Hardware | None:
    """Return the machine that is planned for, or None for ranks on CPUs."""
    named: str = ASSUMED if given.hardware is None else given.hardware
    name = None if named == "cpu" else named
    shares = {part: getattr(given, part) for part in ("compute", "links")}
    shares = {part: share for part, share in shares.items() if share is not None}
    if not shares:
        return name
    machine = hardware_for(name)
    if machine is None:
        parser.error(f"--{', --'.join(shares)}: a plan for CPUs has no time; name --hardware")
    return machine.scaled(**shares)


def _complete(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Give a known shape what it is mostly trained with, where nothing is said."""
    if given.policy is None and given.units is None:
        given.policy = shapes.Layer.__name__
    if given.batch is None or re.fullmatch(r"\d+", given.batch):
        given.batch = f"{given.batch or 1}x{LENGTH}"
    if re.fullmatch(r"\d+(,\d+)+", given.batch):
        meant = given.batch.replace(",", "x")
        parser.error(
            f"--batch: commas are between tensors; write {meant} for a tensor of that shape"
        )
    given.param_dtype = given.param_dtype or torch.bfloat16
    given.reduce_dtype = given.reduce_dtype or torch.float32
    given.optimizer = given.optimizer or "AdamW"


def _tell(found: Plan, given: argparse.Namespace) -> None:
    if found.step is not None:
        _print(str(found.verdict(given.budget)))
        if given.hardware is None:
            _print(f"on {ASSUMED}, which is assumed: --hardware names another, or cpu")
        if found.hardware is not None and found.hardware == HARDWARE.get(found.hardware.name):
            _print(
                "at the machine's peaks, so no run is faster: --compute 0.7 --links 0.8 is usual"
            )
        _print("")
    _print(table_of(found))
    if given.advice:
        advice = found.advice(given.budget)
        for said in advice:
            _print(f"\n{said.about}: {said.found}.\n  {said.change}\n  {said.gain}")
        if not advice:
            _print("\nno advice: nothing that it looks for is wrong")
    if given.budget is not None or given.suggest:
        search = search_of(found, given.budget, lambda one: _say(f"  {one}"))
        _print("")
        for one in search.run():
            _print(str(one))
    if given.html is not None:
        found.html(given.html, budget=given.budget)
        _print(f"\nwrote {given.html}")


def _print(text: str) -> None:
    print(in_terminal(text), flush=True)  # who waits for the rest sees what is known


def _say(text: str) -> None:
    print(in_terminal(text), file=sys.stderr, flush=True)


class _Reporter:
    """Says on stderr what is planned, how long it will take, and how long it took."""

    def __init__(self, model: nn.Module) -> None:
        parts = sum(1 for module in model.modules() if not any(True for _ in module.children()))
        self._expected = SECONDS_OF_A_MODULE * parts
        self._started = 0.0

    def __call__(self, what: str) -> None:
        if what:
            self._started = time.monotonic()
            if self._expected >= 1.0:
                _say(f"planning {what}: about {self._expected:.0f} s")
            return
        took = time.monotonic() - self._started
        if self._expected >= 1.0:
            _say(f"  planned in {took:.1f} s")
        self._expected = took


def _build(parser: argparse.ArgumentParser, name: str) -> nn.Module:
    factory = _named(parser, "model", name)
    missing = _without_default(factory)
    if missing:
        parser.error(f"model: {name} needs {', '.join(missing)}: {WANTED}")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        parser.error(f"model: {name} made {_kind(model)}, and a module is needed: {WANTED}")
    return model


def _without_default(factory: Callable[..., Any]) -> list[str]:
    """Return the arguments that a call must have."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        given = inspect.signature(factory).parameters.values()
    except ValueError:  # of C, which need not say
        return []
    return [one.name for one in given if one.default is one.empty and one.kind not in rest]


def _named(parser: argparse.ArgumentParser, option: str, name: str) -> Callable[..., Any]:
    """Return what ``package.module:name`` names. What that module raises is the user's to see."""
    module_name, _, path = name.partition(":")
    if not path or not module_name:
        parser.error(f"{option}: expected package.module:name, found {name!r}")
    if sys.path[:1] != [""] and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, also for an installed script
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # that module was found, and imports another one that is not there
        parser.error(
            f"{option}: there is no module {error.name!r}, for {name!r}: run this where "
            "`import` finds it"
        )
    for part in path.split("."):
        if not hasattr(found, part):
            parser.error(f"{option}: {module_name} has no {path!r}; it has {_some(vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        parser.error(f"{option}: {name} is {_kind(found)}, and cannot be called")
    return found  # type: ignore[no-any-return]  # looked up by name


def _mark_units(
    parser: argparse.ArgumentParser, model: nn.Module, given: argparse.Namespace
) -> Callable[[nn.Module], bool] | None:
    """Mark the modules that classes or patterns pick; return the policy that finds the marks."""
    asked = given.policy if given.policy is not None else given.units
    if asked is None:
        return None
    below = [(name, module) for name, module in model.named_modules() if name]
    for word in filter(None, asked.split(",")):
        if given.policy is not None:
            chosen = [m for _, m in below if word in {cls.__name__ for cls in type(m).__mro__}]
            known = [class_name(module) for _, module in below]
        else:
            chosen = [module for name, module in below if _matches(name, word)]
            known = [name for name, _ in below]
        if not chosen:
            option = "--policy" if given.policy is not None else "--units"
            parser.error(f"{option}: nothing in the model is {word!r}; there is {_some(known)}")
        for module in chosen:
            module.__dict__[MARK] = True
    return lambda module: MARK in module.__dict__


def _matches(name: str, pattern: str) -> bool:
    """Match part by part: ``blocks.*`` is each block, and nothing inside one."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _batch(parser: argparse.ArgumentParser, text: str | None) -> Any:
    if text is None:
        return None
    tensors: list[torch.Tensor] = []
    for part in text.split(","):
        found = TENSOR.fullmatch(part)
        if found is None:
            if "," in text or text[:1].isdigit():
                parser.error(f"--batch: expected a shape as 4x128:int64, found {part!r}")
            return _named(parser, "--batch", text)()
        try:
            shape = [int(size) for size in found[1].split("x")]
            dtype = _dtype(found[2] or "int64")
            tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
        except argparse.ArgumentTypeError as error:
            parser.error(f"--batch: {error}")
        except (ValueError, TypeError, RuntimeError, OverflowError):  # more than memory has bytes
            parser.error(f"--batch: expected a tensor that can be, found {part[:60]!r}")
    return tuple(tensors)


def _optimizer(parser: argparse.ArgumentParser, name: str | None) -> Callable[..., Any] | None:
    if name is None or ":" in name:
        return None if name is None else _named(parser, "--optimizer", name)
    return _named(parser, "--optimizer", f"torch.optim:{name}")


def _memory(text: str | None) -> str | int | None:
    """Return a setting's name, or bytes: a size is what begins with a digit."""
    if text is None or not text[:1].isdigit():
        return text
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{0,18})?)\s*([a-z]*)", text.lower())
    if found is None or found[2] not in units:
        return text  # and set_memory says what it takes
    return int(float(found[1]) * units[found[2]])


def _mesh(text: str) -> int | tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(re.fullmatch(r"0*[1-9]\d{0,17}", size) for size in sizes) or len(sizes) > 2:
        raise argparse.ArgumentTypeError(
            "expected ranks to shard over, as 64, or replicas and ranks, as 8x64; found "
            f"{text[:60]!r}"
        )
    return int(sizes[0]) if len(sizes) == 1 else tuple(map(int, sizes))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"expected a dtype of torch, as bfloat16; found {name!r}")
    return found


def _some(names: Any) -> str:
    public = [name for name in dict.fromkeys(names) if not str(name).startswith("_")]
    return ", ".join(map(str, public[:12])) + (", ..." if len(public) > 12 else "")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
