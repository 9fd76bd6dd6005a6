"""``python -m fsdp2 plan``: parses arguments, reports errors in them early, and shows progress."""

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
from typing import Any, TextIO

import torch
import torch.nn as nn

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import class_name, in_terminal
from fsdp2._core.base.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2._tools.plan import setup, shapes
from fsdp2._tools.plan.budget import search_of, size_of
from fsdp2._tools.plan.hardware import HARDWARE, Hardware, hardware_for
from fsdp2._tools.plan.plan import Plan, plan, table_of

MARK = "_fsdp2_is_unit"
"""Attribute in the ``__dict__`` of modules that become units; it is copied with the model."""

PLAN = """\
examples:
  python -m fsdp2 plan my_model:build --mesh 64 --policy Block
  python -m fsdp2 plan my_model:build --mesh 8x64 --policy Block --batch 4x4096:int64 \\
      --param-dtype bfloat16 --optimizer AdamW --html plan.html
"""
WANTED = "pass a function that returns a module, or a module class; neither may require arguments"
TENSOR = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
ASSUMED = "h100-nvlink-ib"
"""The default machine: a verdict requires a machine, and most users have a similar one."""
LENGTH = 4096
"""Default number of tokens in a sequence, for a known model shape."""
KNOWN = f"known shapes: {', '.join(shapes.SHAPES)}\nknown hardware: {', '.join(HARDWARE)}\n"
SECONDS_OF_A_MODULE = 0.012
"""Planning time per module without children, for the first estimate; deliberately high."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 plan",
        description="Predict whether a sharded model fits in memory, how fast a step is, and what "
        "uses memory.",
        epilog=PLAN + KNOWN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        help="package.module:name of a function or class that needs no arguments; a known shape, "
        "e.g. llama3-8b; or a Hugging Face config.json",
    )
    add(
        "--mesh",
        required=True,
        type=_mesh,
        help="32: shard over 32 ranks; 4x8: 4 replicas, each sharded over 8 ranks",
    )
    units = parser.add_mutually_exclusive_group()
    units.add_argument("--policy", metavar="CLASSES", help="classes of units: Block,Embedding")
    units.add_argument("--units", metavar="PATTERNS", help="names of units: 'blocks.*,head'")
    add(
        "--batch",
        help="inputs of one rank: shapes, e.g. 4x128:int64[,...]; module:function; or, for a known "
        f"model shape, the number of sequences of {LENGTH} tokens, e.g. 4",
    )
    add("--memory", help="low, balanced, fast, or a size, e.g. 2GiB")
    add("--param-dtype", type=_dtype, metavar="DTYPE", help="dtype of compute, e.g. bfloat16")
    add("--reduce-dtype", type=_dtype, metavar="DTYPE", help="dtype of reductions")
    add("--optimizer", metavar="NAME", help="a name in torch.optim, or module:name")
    add(
        "--hardware",
        metavar="NAME",
        help="a machine, e.g. h100; a file written by doctor --json; or cpu, for ranks on CPUs "
        f"({ASSUMED})",
    )
    for part, what in (("compute", "FLOP rates"), ("links", "link bandwidths")):
        add(
            f"--{part}",
            type=float,
            metavar="SHARE",
            help=f"the fraction of the hardware's {what} that your steps reach, e.g. 0.6",
        )
    add(
        "--budget",
        metavar="SIZE",
        help="memory limit instead of the hardware's, e.g. 70GB; implies --suggest",
    )
    add("--suggest", action="store_true", help="list settings that fit, best first")
    add("--offload", action="store_true", help="keep shards in host memory")
    for what in ("activations", "states"):
        add(f"--offload-{what}", action="store_true", help=f"offload {what} from a device")
    add(
        "--activation-checkpointing",
        action="store_true",
        help="recompute activations of units in backward",
    )
    add("--loss-chunks", type=int, metavar="N", help="count logits as if computed in N chunks")
    add("--advice", action="store_true", help="list problems and improvements")
    add("--rank", type=int, default=0, help="the rank whose shards and memory are shown (0)")
    add("--html", metavar="FILE", help="write an HTML page with charts")
    return parser


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Compute the plan and print it, verdict first."""
    try:
        shape = shapes.shape_for(given.model)
    except ValueError as error:
        parser.error(f"model: {error}")
    if shape is None and ":" not in given.model:
        parser.error(
            f"model: expected package.module:name, found {given.model!r}; alternatively, pass a "
            f"config.json or a known shape: {', '.join(shapes.SHAPES)}"
        )
    if shape is None:
        model = _build(parser, given.model)
    else:
        with torch.device("meta"):
            model = shapes.Decoder(shape)
        _complete(parser, given)
    flags = ("activation_checkpointing", "offload_activations", "offload_states")
    keywords: dict[str, Any] = {
        "policy": _mark_units(parser, model, given),
        "batch": _batch(parser, given.batch),
        "memory": _memory(given.memory),
        "optimizer": _optimizer(parser, given.optimizer),
        "hardware": _hardware(parser, given),
        **{name: getattr(given, name) for name in ("mesh", "rank", "loss_chunks", *flags)},
    }
    if given.param_dtype is not None or given.reduce_dtype is not None:
        keywords["mp_policy"] = MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
    if given.offload:
        keywords["offload_policy"] = CPUOffloadPolicy()
    with setup.listening(_Reporter(model)):
        found = plan(model, **{k: v for k, v in keywords.items() if v is not None})
        _tell(found, given)


def _hardware(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str | Hardware | None:
    """Return the machine to plan for, or None for ranks on CPUs."""
    named: str = ASSUMED if given.hardware is None else given.hardware
    name = None if named == "cpu" else named
    shares = {part: getattr(given, part) for part in ("compute", "links")}
    shares = {part: share for part, share in shares.items() if share is not None}
    if not shares:
        return name
    machine = hardware_for(name)
    if machine is None:
        parser.error(f"--{', --'.join(shares)}: a plan for CPUs has no times; pass --hardware")
    return machine.scaled(**shares)


def _complete(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Set the usual defaults for a known shape."""
    if given.policy is None and given.units is None:
        given.policy = shapes.Layer.__name__
    if given.batch is None or re.fullmatch(r"\d+", given.batch):
        given.batch = f"{given.batch or 1}x{LENGTH}"
    if re.fullmatch(r"\d+(,\d+)+", given.batch):
        meant = given.batch.replace(",", "x")
        parser.error(f"--batch: commas separate tensors; write {meant} for a tensor of that shape")
    given.param_dtype = given.param_dtype or torch.bfloat16
    given.reduce_dtype = given.reduce_dtype or torch.float32
    given.optimizer = given.optimizer or "AdamW"


def _tell(found: Plan, given: argparse.Namespace) -> None:
    if found.step is not None:
        _print(str(found.verdict(given.budget)))
        if given.hardware is None:
            _print(f"on {ASSUMED} by default; --hardware selects another machine, or cpu")
        if found.hardware is not None and found.hardware == HARDWARE.get(found.hardware.name):
            usual = "typical: --compute 0.7 --links 0.8"
            _print(f"at the machine's peak rates, an upper bound on speed; {usual}")
        _print("")
    _print(table_of(found))
    if given.advice:
        advice = found.advice(given.budget)
        for said in advice:
            _print(f"\n{said.about}: {said.found}.\n  {said.change}\n  {said.gain}")
        if not advice:
            _print("\nno advice: no known problem was found")
    if given.budget is not None or given.suggest:
        search = search_of(found, given.budget, lambda one: _print(f"  {one}", sys.stderr))
        _print("")
        for one in search.run():
            _print(str(one))
    if given.html is not None:
        found.html(given.html, budget=given.budget)
        _print(f"\nwrote {given.html}")


def _print(text: str, file: TextIO | None = None) -> None:
    print(in_terminal(text), file=file, flush=True)  # flushed, so that the user sees results early


class _Reporter:
    """Reports progress on stderr: the current plan, and its expected and actual planning time."""

    def __init__(self, model: nn.Module) -> None:
        parts = sum(1 for module in model.modules() if not any(True for _ in module.children()))
        self._expected = SECONDS_OF_A_MODULE * parts
        self._started = 0.0

    def __call__(self, what: str) -> None:
        if what:
            self._started = time.monotonic()
            if self._expected >= 1.0:
                _print(f"planning {what}: about {self._expected:.0f} s", sys.stderr)
            return
        took = time.monotonic() - self._started
        if self._expected >= 1.0:
            _print(f"  planned in {took:.1f} s", sys.stderr)
        self._expected = took


def _build(parser: argparse.ArgumentParser, name: str) -> nn.Module:
    factory = _named(parser, "model", name)
    missing = _without_default(factory)
    if missing:
        parser.error(f"model: {name} needs {', '.join(missing)}: {WANTED}")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        parser.error(f"model: {name} returned {_kind(model)}, which is not a module: {WANTED}")
    return model


def _without_default(factory: Callable[..., Any]) -> list[str]:
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        given = inspect.signature(factory).parameters.values()
    except ValueError:  # C functions may have no signature
        return []
    return [one.name for one in given if one.default is one.empty and one.kind not in rest]


def _named(parser: argparse.ArgumentParser, option: str, name: str) -> Callable[..., Any]:
    """Import the object ``package.module:name``. Exceptions raised by that module propagate."""
    module_name, _, path = name.partition(":")
    if not path or not module_name:
        parser.error(f"{option}: expected package.module:name, found {name!r}")
    if sys.path[:1] != [""] and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `python -m` does this; an installed script does not
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the named module exists but imports a missing one
        parser.error(
            f"{option}: found no module {error.name!r} for {name!r}; run the command in a folder "
            "where `import` finds the module"
        )
    for part in path.split("."):
        if not hasattr(found, part):
            parser.error(f"{option}: {module_name} has no {path!r}; it has {_some(vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        parser.error(f"{option}: {name} is {_kind(found)}, which cannot be called")
    return found  # type: ignore[no-any-return]  # looked up by name


def _mark_units(
    parser: argparse.ArgumentParser, model: nn.Module, given: argparse.Namespace
) -> Callable[[nn.Module], bool] | None:
    """Mark modules selected by classes or patterns; return a policy that selects marked modules."""
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
            parser.error(f"{option}: no module matches {word!r}; the model has {_some(known)}")
        for module in chosen:
            module.__dict__[MARK] = True
    return lambda module: MARK in module.__dict__


def _matches(name: str, pattern: str) -> bool:
    """Match the dotted parts separately: ``blocks.*`` matches each block, but nothing inside it."""
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
                parser.error(f"--batch: expected a shape such as 4x128:int64, found {part!r}")
            return _named(parser, "--batch", text)()
        try:
            shape = [int(size) for size in found[1].split("x")]
            dtype = _dtype(found[2] or "int64")
            tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
        except argparse.ArgumentTypeError as error:
            parser.error(f"--batch: {error}")
        # raised, for example, if a size exceeds the address space
        except (ValueError, TypeError, RuntimeError, OverflowError):
            parser.error(f"--batch: expected a valid shape and dtype, found {part[:60]!r}")
    return tuple(tensors)


def _optimizer(parser: argparse.ArgumentParser, name: str | None) -> Callable[..., Any] | None:
    if name is None:
        return None
    return _named(parser, "--optimizer", name if ":" in name else f"torch.optim:{name}")


def _memory(text: str | None) -> str | int | None:
    """Return a number of bytes if the text is a size, else the text; ``set_memory`` checks it."""
    try:
        return text if text is None else size_of("plan", "memory", text)
    except ConfigError:
        return text


def _mesh(text: str) -> int | tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(re.fullmatch(r"0*[1-9]\d{0,17}", size) for size in sizes) or len(sizes) > 2:
        raise argparse.ArgumentTypeError(
            "expected a number of ranks to shard over, such as 64, or numbers of replicas and of "
            f"ranks per replica, such as 8x64; found {text[:60]!r}"
        )
    return int(sizes[0]) if len(sizes) == 1 else tuple(map(int, sizes))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(
            f"expected the name of a torch dtype, such as bfloat16; found {name!r}"
        )
    return found


def _some(names: Any) -> str:
    public = [name for name in dict.fromkeys(names) if not str(name).startswith("_")]
    return ", ".join(map(str, public[:12])) + (", ..." if len(public) > 12 else "")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
