"""Every code block of the manual does what its page says: on ranks, to the last character.

The convention is in `_blocks`. A page's python is one program; the ranks of the pools run it, so
that nothing imports torch anew. Commands run in forks, as the launcher would start them; in the
pool the launcher itself starts those of a page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing as mp
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.docs._blocks import (
    LANGUAGES,
    ROOT,
    Block,
    Command,
    commands,
    pages,
    ranks_of,
    read_blocks,
)
from tests.kit.pool import find_free_port, ranks
from tests.kit.slow import with_slow

MANUAL = pages("index.md", "glossary.md", "tutorial", "guides", "reference")
MANUAL += pages("plan.md", "record.md", "pages.md", "differences.md", "figures.md")
OLDER = pages("architecture.md", "checkpoints.md", "clients.md", "compile.md")
"""Pages from before the manual: what python they have that is no fragment runs, too."""

ELSEWHERE = {
    "docs/from-fsdp1.md": "tests/test_from_fsdp1.py runs its blocks",
    "README.md": "a test of its own writes its program into a file, and runs its command",
}
"""Pages whose blocks are not run here, and why."""

PROGRAMS = [page for page in MANUAL + OLDER if any(block.runs for block in read_blocks(page))]
LAUNCHED = [
    page for page in MANUAL if any(block.language == "console" for block in read_blocks(page))
]
COMMANDS_BY_DEFAULT = [f"docs/tutorial/{page}.md" for page in ("step0", "step1", "step3")]
"""Whose commands the default suite runs: no ranks, shards, files. The pool has all."""
UNDER_TORCHRUN = "docs/tutorial/step1.md"
"""Whose commands the launcher starts, too. Those of all pages took 900 s beside other tests."""
MOST_FRAGMENTS = 0
MOST_UNRUN = 7
"""Of the manual's own pages. More of them is a decision, not an accident."""

LIMIT_S = 400
"""For a hang alone: a program of 8 s took over 120 s where other tests had the machine."""
ACCEPT = "EXPECTTEST_ACCEPT"
"""Set to 1, what was printed is written into the pages; as for inline expectations elsewhere."""
FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.kit.preload"])


def names(found: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in found]


def on(count: int) -> list[str]:
    return names([page for page in PROGRAMS if ranks_of(page) == count])


def environment() -> dict[str, str]:
    """The environment for a launcher: this package importable, and no trace of a launcher above."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    paths = [part for part in (os.environ.get("PYTHONPATH"), str(ROOT)) if part]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def in_folder(path: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def shared_folder(rank: int) -> Iterator[None]:
    """Work in an empty folder that all ranks see."""
    told: list[Any] = [tempfile.mkdtemp(prefix="manual-") if rank == 0 else None]
    dist.broadcast_object_list(told)
    try:
        with in_folder(told[0]):
            yield
    finally:
        if rank == 0:
            shutil.rmtree(told[0], ignore_errors=True)


@contextlib.contextmanager
def as_program() -> Iterator[dict[str, Any]]:
    """Yield the names of a new main module: what a page defines pickles as a program's does."""
    before, program = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = program
    try:
        yield vars(program)
    finally:
        sys.modules["__main__"] = before


def run_page(page: str, rank: int) -> None:
    """Run the blocks of a page in order, in one namespace, and compare what they print.

    A difference is told at the end: a rank that stops alone leaves the others in a collective.
    """
    printed = io.StringIO()
    wrong: list[str] = []
    place = page
    with shared_folder(rank), as_program() as names:
        for block in read_blocks(ROOT / page):
            if block.language == "output":
                wrong += compare(block, printed)
            elif block.runs:
                place = block.place
                source = "\n" * block.line + block.text  # so that a traceback has the page's lines
                with contextlib.redirect_stdout(printed):
                    exec(compile(source, str(ROOT / page), "exec"), names)
        dist.barrier()
    if printed.getvalue():
        wrong.append(f"{place}: printed, and not shown:\n{printed.getvalue()}")
    if rank == 0 and wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def compare(block: Block, printed: io.StringIO) -> list[str]:
    """Take what was printed; say how it differs from a block."""
    found = printed.getvalue()
    printed.seek(0)
    printed.truncate()
    if found == block.text:
        return []
    if os.environ.get(ACCEPT) == "1":
        if dist.get_rank() == 0:
            accept(block, found)
        return []
    return [f"{block.place}: it printed\n{found}and the page has\n{block.text}"]


def accept(block: Block, found: str) -> None:
    """Write what was printed into the page."""
    page = ROOT / block.page
    fence = f"```{block.language}\n"
    shown = f"{fence}{block.text}```\n"
    text = page.read_text()
    assert shown in text, block.place
    page.write_text(text.replace(shown, f"{fence}{found}```\n", 1))


@pytest.mark.parametrize("page", on(2))
@ranks(2, limit_s=90)
def test_a_page_runs(page: str, rank: int) -> None:
    run_page(page, rank)


@pytest.mark.parametrize("page", on(1))
@ranks(1, limit_s=90)
def test_a_page_runs_on_one_rank(page: str, rank: int) -> None:
    run_page(page, rank)


@pytest.mark.parametrize("page", on(4))
@ranks(4, limit_s=90)
def test_a_page_runs_on_four_ranks(page: str, rank: int) -> None:
    run_page(page, rank)


@dataclass(frozen=True)
class Launch:
    """What a command starts on so many ranks: a file (here or in the repository) or a module."""

    program: str
    arguments: list[str]
    count: int

    @classmethod
    def of(cls, command: Command, folder: Path) -> Launch:
        words, count = list(command.words[1:]), 1
        if command.words[0] == "torchrun":
            option, size, *words = words
            assert option == "--nproc-per-node", f"cannot run {command.words}"
            count = int(size)
        if words[0] == "-m":
            return cls(words[1], words[2:], count)
        place = folder if (folder / words[0]).is_file() else ROOT
        return cls(str(place / words[0]), words[1:], count)

    def start(self) -> None:
        """Run it as the main module of this process."""
        sys.argv = [self.program, *self.arguments]
        if self.program.endswith(".py"):
            sys.path.insert(0, str(Path(self.program).parent))
            runpy.run_path(self.program, run_name="__main__")
        else:
            runpy.run_module(self.program, run_name="__main__", alter_sys=True)


def be_a_rank(rank: int, launch: Launch, port: int, folder: str, printed: list[str]) -> None:
    """Be what the launcher would start, in a process that has imported torch; rank 0 prints."""
    for descriptor, path in enumerate(printed, start=1):
        where = path if rank == 0 or descriptor == 2 else os.devnull
        os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  # until the process ends
    if launch.count > 1:
        size = str(launch.count)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    torch.set_num_threads(1)
    counters.clear()  # the process that this one was forked of may have compiled something
    launch.start()
    sys.stdout.flush()


def run_forked(launch: Launch, folder: Path) -> str:
    """Return what a command prints, without the launcher."""
    printed = [str(folder / f".{stream}") for stream in ("stdout", "stderr")]
    for path in printed:
        Path(path).write_text("")
    port = find_free_port()
    processes = [
        FORKED.Process(target=be_a_rank, args=(rank, launch, port, str(folder), printed))
        for rank in range(launch.count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
    said = Path(printed[1]).read_text()
    assert all(process.exitcode == 0 for process in processes), said
    return Path(printed[0]).read_text()


def run_launcher(command: Command, folder: Path) -> str:
    """Return what a command prints, as a user runs it."""
    (folder / "examples").exists() or (folder / "examples").symlink_to(ROOT / "examples")
    words = command.words[1:]
    if command.words[0] == "torchrun":
        words = ("-m", "torch.distributed.run", *words)
    finished = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def run_commands(page: str, folder: Path, *, launcher: bool) -> None:
    for block in read_blocks(ROOT / page):
        if block.language != "console" or block.mark:
            continue
        for command in commands(block):
            if launcher:
                found = run_launcher(command, folder)
            else:
                found = run_forked(Launch.of(command, folder), folder)
            said = " ".join(command.words)
            if found != command.printed and os.environ.get(ACCEPT) == "1":
                before, after = (f"$ {said}\n{text}" for text in (command.printed, found))
                text = block.text.replace(before, after)
                accept(block, text)
                block = replace(block, text=text)
                continue
            assert found == command.printed, (
                f"{block.place}: {said} printed\n{found}and the page has\n{command.printed}"
            )


@pytest.mark.parametrize("page", with_slow(names(LAUNCHED), COMMANDS_BY_DEFAULT))
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    run_commands(page, tmp_path, launcher=False)


def test_the_readmes_program_runs(tmp_path: Path) -> None:
    (program,) = (b.text for b in read_blocks(ROOT / "README.md") if b.language == "python")
    (tmp_path / "hello.py").write_text(program)
    run_commands("README.md", tmp_path, launcher=False)


@pytest.mark.slow
def test_commands_under_the_launcher(tmp_path: Path) -> None:
    run_commands(UNDER_TORCHRUN, tmp_path, launcher=True)


@pytest.mark.parametrize("page", names(MANUAL))
def test_every_block_is_checked_or_says_why_not(page: str) -> None:
    after_python = False
    for block in read_blocks(ROOT / page):
        if block.is_directive:
            continue
        assert block.language in LANGUAGES, f"{block.place}: {block.language or 'no language'}"
        if block.mark == "fragment":
            assert block.language == "python", block.place
            ast.parse(block.text)
        elif block.mark == "file":
            assert block.language == "python", block.place
        elif block.mark:
            assert block.language == "console", block.place
        if block.language == "output":
            assert after_python, f"{block.place}: output of nothing"
        after_python = after_python or block.runs


FILES = [block for page in MANUAL for block in read_blocks(page) if block.mark == "file"]


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.reason.rpartition("/")[2])
def test_a_page_shows_a_program_as_it_is(block: Block) -> None:
    """The site reads the file itself; who reads Markdown has to see the same."""
    program = (ROOT / block.page).parent.joinpath(block.reason).read_text()
    if program != block.text and os.environ.get(ACCEPT) == "1":
        accept(block, program)
        return
    assert program == block.text, f"{block.place} is not {block.reason}; {ACCEPT}=1 renews it"


def test_every_page_with_python_is_known() -> None:
    """Notes on decisions show what was, and are left out."""
    found = [ROOT / "README.md", *pages("."), *sorted((ROOT / "benchmarks").glob("*.md"))]
    with_python = {
        str(page.relative_to(ROOT))
        for page in found
        if any(block.language == "python" for block in read_blocks(page))
        and page.parent.name != "decisions"
    }
    assert with_python <= {*names(MANUAL), *names(OLDER), *ELSEWHERE}


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Say how many blocks there are, and how many run; keep those few that do not."""
    manual = [block for page in MANUAL for block in read_blocks(page)]
    older = [block for page in OLDER for block in read_blocks(page)]
    kinds = Counter(block.mark or block.language for block in manual)
    run = [c for b in manual if b.language == "console" and not b.mark for c in commands(b)]
    assert kinds["fragment"] <= MOST_FRAGMENTS
    assert kinds["not run"] <= MOST_UNRUN
    with capsys.disabled():
        print(
            f"\nmanual: {len(MANUAL)} pages, {len(manual)} blocks. "
            f"Run: {kinds['python']} of python, {kinds['file']} programs, {len(run)} commands. "
            f"Compared: {kinds['output'] + len(run)} outputs. "
            f"Not run: {kinds['fragment']} fragments, {kinds['not run']} commands. "
            f"Left to the generator: {sum(block.is_directive for block in manual)}\n"
            f"older pages: {len(OLDER)}, with {len(older)} blocks, "
            f"{sum(block.mark == 'fragment' for block in older)} of them fragments"
        )
