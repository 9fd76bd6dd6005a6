"""The command lines ``python -m fsdp2 plan``, ``report``, ``compare`` and ``doctor``.

Parses arguments, and rejects invalid ones before any expensive work.
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
    """Run a command. Exit with status 2 and a message if the arguments are invalid."""
    if command == "doctor":
        # imported late: it loads torch's FSDP2, checkpoints, and all other code that it inspects
        from fsdp2._tools.doctor import run as doctor

        sys.exit(doctor.main(arguments))
    if command == "explain":
        paragraphs.main(arguments)
        return
    make_parser, act = _report_parser, _report
    if command == "plan":
        from fsdp2._tools.plan import command as command_of_plan  # ``report`` needs no plans

        make_parser, act = command_of_plan.make_parser, command_of_plan.run
    elif command == "compare":
        make_parser, act = _compare_parser, _compare
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        act(parser, given)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe; Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (fsdp2.FSDPError, OSError) as error:
        parser.error(in_terminal(str(error).removeprefix(f"{command}: ")))


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 compare",
        description="Report where two recordings made by fsdp2.debug.record_bits first differ. "
        "The exit status is 1 if they differ.",
        allow_abbrev=False,
    )
    for name in ("run1", "run2"):
        parser.add_argument(name, help="the folder of a run, with the files of all its ranks")
    return parser


def _compare(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    found = fsdp2.debug.same_bits(given.run1, given.run2)
    print(found)
    if not found:
        sys.stdout.flush()
        sys.exit(1)


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 report",
        description="Summarize recordings made by fsdp2.record, with all ranks' clocks aligned.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folders", nargs="+", help="recordings of one run: folders, or files of single ranks")
    add("--html", metavar="FILE", help="write an HTML page with charts")
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")
    add("--rows", metavar="FILE", help="write one JSON line per recorded row")
    return parser


def _report(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    found = fsdp2.read_recordings(*given.folders)
    wrote = []
    for name in ("trace", "rows", "html"):
        path = getattr(given, name)
        if path is not None:
            getattr(found, name)(path)
            wrote.append(f"wrote {path}")
    print("\n".join([*map(in_a_line, _lines(found.page())), *wrote]))


def _lines(page: Page) -> Iterator[str]:
    """Yield the text of a page line by line, without the charts."""
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
