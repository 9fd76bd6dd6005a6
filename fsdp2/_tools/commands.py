"""``python -m fsdp2 plan``, ``report`` and ``doctor``: what a shell can ask (not ``explain``).

Owns the command lines: their words, and what is said of a wrong one, before anything large runs. It
must not know how a plan is made or a page drawn.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

import fsdp2
from fsdp2._core.base import paragraphs
from fsdp2._core.base.names import in_a_line, in_terminal
from fsdp2._tools.pages.content import Page


def run(command: str, arguments: Sequence[str]) -> None:
    """Run a command. Ends with 2, and a word about it, if the arguments are wrong."""
    if command == "doctor":
        # Not at the top: it loads torch's own FSDP2, checkpoints and all else that it looks into.
        from fsdp2._tools.doctor import run as doctor

        sys.exit(doctor.main(arguments))
    if command == "explain":
        paragraphs.main(arguments)
        return
    make_parser, act = _report_parser, _report
    if command == "plan":
        from fsdp2._tools.plan import command as command_of_plan  # a report needs no plans

        make_parser, act = command_of_plan.make_parser, command_of_plan.run
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        act(parser, given)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` does; Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (fsdp2.FSDPError, OSError) as error:
        parser.error(in_terminal(str(error).removeprefix(f"{command}: ")))


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
    print("\n".join([*map(in_a_line, _lines(found.page())), *wrote]))


def _lines(page: Page) -> Iterator[str]:
    """Yield what a page says without its pictures."""
    yield page.title
    yield page.subtitle
    yield ""
    for fact in page.facts:
        yield f"{fact.name}: {fact.value}" + (f" ({fact.note})" if fact.note else "")
    for table in page.tables:
        rows = [[in_a_line(cell) for cell in row] for row in (table.columns, *table.rows)]
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
