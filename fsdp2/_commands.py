"""``python -m fsdp2 plan``, ``report``, ``explain`` and ``doctor``: what a shell can ask.

Owns the command lines: their words, and what is said of a wrong one, before anything large runs. It
must not know how a plan is made or a page drawn.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

import fsdp2
from fsdp2._base.names import class_name, printable
from fsdp2._base.paragraphs import CODE, in_terminal, read_paragraphs
from fsdp2._pages.content import Page

MARK = "_fsdp2_is_unit"
"""In the ``__dict__`` of modules that become units: a plan is made of a copy, which keeps it."""

PLAN = """\
examples:
  python -m fsdp2 plan my_model:build --mesh 64 --policy Block
  python -m fsdp2 plan my_model:build --mesh 8x64 --policy Block --batch 4x4096:int64 \\
      --param-dtype bfloat16 --optimizer AdamW --html plan.html
"""
WANTED = "name a function without arguments that returns one, or a class that needs none"
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)")


def run(command: str, arguments: Sequence[str]) -> None:
    """Run a command. Ends with 2, and a word about it, if the arguments are wrong."""
    if command == "doctor":
        # Not at the top: it loads torch's own FSDP2, checkpoints and all else that it looks into.
        from fsdp2._doctor import run as doctor

        sys.exit(doctor.main(arguments))
    make_parser, act = {
        "plan": (_plan_parser, _plan),
        "report": (_report_parser, _report),
        "explain": (_explain_parser, _explain),
    }[command]
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        act(parser, given)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` does; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (fsdp2.FSDPError, OSError) as error:
        parser.error(_shown(str(error).removeprefix(f"{command}: ")))


def _shown(text: str) -> str:
    """Return text for a terminal: names in it, of units, hosts and files, may hold escapes."""
    return "\n".join(map(_in_a_line, text.split("\n")))


def _in_a_line(text: str) -> str:
    return printable(text, most=len(text))


# plan


def _plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 plan",
        description="Tell what sharding a model gives: units, bytes, collectives, memory, time.",
        epilog=PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("factory", help="package.module:name of a function without arguments, or a class")
    add("--mesh", required=True, type=_mesh, help="64: shard over 64 ranks; 8x64: 8 replicas")
    units = parser.add_mutually_exclusive_group()
    units.add_argument("--policy", metavar="CLASSES", help="classes of units: Block,Embedding")
    units.add_argument("--units", metavar="PATTERNS", help="names of units: 'blocks.*,head'")
    add("--batch", help="of one rank: shapes as 4x128:int64[,...], or module:function")
    add("--memory", help="low, balanced, fast, or a size as 2GiB")
    add("--param-dtype", type=_dtype, metavar="DTYPE", help="of compute, for example bfloat16")
    add("--reduce-dtype", type=_dtype, metavar="DTYPE", help="of reductions")
    add("--optimizer", metavar="NAME", help="of torch.optim, or module:name")
    add("--hardware", metavar="NAME", help="a known machine, or a doctor's file: adds times")
    add("--budget", metavar="SIZE", help="as 70GB: says which settings fit into it")
    add("--offload", action="store_true", help="keep shards in the memory of the host")
    add(
        "--activation-checkpointing",
        action="store_true",
        help="compute activations of units again in backward",
    )
    add("--advice", action="store_true", help="say what is wrong, and what would be better")
    add("--rank", type=int, default=0, help="whose shards and memory are told (0)")
    add("--html", metavar="FILE", help="write a page with pictures")
    return parser


def _plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    model = _build(parser, given.factory)
    policy = _mark_units(parser, model, given)
    keywords: dict[str, Any] = {
        "mesh": given.mesh,
        "policy": policy,
        "batch": _batch(parser, given.batch),
        "memory": _memory(given.memory),
        "optimizer": _optimizer(parser, given.optimizer),
        "hardware": given.hardware,
        "rank": given.rank,
        "activation_checkpointing": given.activation_checkpointing,
    }
    if given.param_dtype is not None or given.reduce_dtype is not None:
        keywords["mp_policy"] = fsdp2.MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
    if given.offload:
        keywords["offload_policy"] = fsdp2.CPUOffloadPolicy()
    found = fsdp2.plan(model, **{k: v for k, v in keywords.items() if v is not None})
    print(_shown(str(found)))
    if given.advice:
        for said in found.advice(given.budget):
            print(_shown(f"\n{said.about}: {said.found}.\n  {said.change}\n  {said.gain}"))
    if given.budget is not None:
        print()
        for one in found.suggest(given.budget):
            print(_shown(str(one)))
    if given.html is not None:
        found.html(given.html, budget=given.budget)
        print(f"\nwrote {given.html}")


def _build(parser: argparse.ArgumentParser, name: str) -> nn.Module:
    factory = _named(parser, "factory", name)
    missing = _without_default(factory)
    if missing:
        parser.error(f"factory: {name} needs {', '.join(missing)}: {WANTED}")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        parser.error(f"factory: {name} made {_kind(model)}, and a module is needed: {WANTED}")
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
            shape, dtype = [int(size) for size in found[1].split("x")], _dtype(found[2])
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


# report


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 report",
        description="Tell what fsdp2.record wrote, of all ranks on one clock.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folders", nargs="+", help="folders, or files of single ranks, of one run")
    add("--html", metavar="FILE", help="write a page with pictures")
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    add("--rows", metavar="FILE", help="write one JSON line for each thing that was seen")
    return parser


def _report(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    found = fsdp2.read_recordings(*given.folders)
    wrote = []
    for name in ("trace", "rows", "html"):  # a page needs a complete step, the others nothing
        path = getattr(given, name)
        if path is not None:
            getattr(found, name)(path)
            wrote.append(f"wrote {path}")
    print("\n".join([*map(_in_a_line, _lines(found.page())), *wrote]))


def _lines(page: Page) -> Iterator[str]:
    """Yield what a page says without its pictures."""
    yield page.title
    yield page.subtitle
    yield ""
    for fact in page.facts:
        yield f"{fact.name}: {fact.value}" + (f" ({fact.note})" if fact.note else "")
    for table in page.tables:
        rows = [[_in_a_line(cell) for cell in row] for row in (table.columns, *table.rows)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        yield ""
        yield table.heading
        for first, *others in rows:
            cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
            yield "  ".join([f"{first:<{widths[0]}}", *cells])
    for advice in page.advice:
        yield ""
        yield f"{advice.severity}: {advice.about} {advice.found}"
        yield from (f"  {line}" for line in (advice.change, advice.gain) if line)
    yield ""


# explain


def _explain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 explain",
        description="Say what the code of a message means, how one gets there, and what to do.",
        allow_abbrev=False,
    )
    parser.add_argument("codes", nargs="*", help="as FS104, or a whole message; none: list all")
    return parser


def _explain(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    known = {paragraph.code: paragraph for paragraph in read_paragraphs()}
    if not given.codes:
        print("\n".join(f"{one.code}  {one.title}" for one in known.values()))
        return
    text = " ".join(given.codes)
    if re.fullmatch(r"[\d\s,]+", text):
        text = re.sub(r"\b(?=\d{3}\b)", "FS", text)
    asked = list(dict.fromkeys(CODE.findall(text.upper())))
    if not asked:
        parser.error(f"codes: expected one as FS104, found {' '.join(given.codes)!r}")
    unknown = [code for code in asked if code not in known]
    if unknown:
        parser.error(f"codes: there is no {', '.join(unknown)} in fsdp2 of this version")
    print("\n\n\n".join(in_terminal(known[code]) for code in asked))
