"""What ranks run: programs, op by op, and what they say when something is wrong."""

from __future__ import annotations

import json
import re
import traceback
import warnings
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

import fsdp2
from tests.fuzz._ops import PERFORM
from tests.fuzz._pair import MismatchError, Pair
from tests.fuzz._program import Op, Program
from tests.fuzz._refusals import refusals

MARK = "FUZZ FOUND"
AT = "FUZZ AT"
OTHER_RANK = "FUZZ OTHER"  # found something
JUDGES_WAIT_S = 8.0  # for ranks that may be waiting for this one, elsewhere


class FuzzError(AssertionError):
    """A program went wrong; the first line of the message is what `signature_of` reads.

    `is_clean`: nothing but a comparison failed, and all ranks are at the same place, so they are
    fit to run another program.
    """

    def __init__(self, told: str, is_clean: bool) -> None:
        super().__init__(told)
        self.is_clean = is_clean


def run(program: Program) -> str:
    """Run a program on this rank; return the code of the error that refused it, or nothing.

    After each op ranks tell each other if they found all as it should be, so that all of them stop
    at the same op.
    """
    judges = _Judges.of_world()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at, op = "building", Op()
        try:
            pair = Pair(program)
            judges.agree("")
            for index, op in enumerate(program.ops):
                at = f"op {index}, {op!r}"
                PERFORM[type(op)](pair, op)
                pair.check(op)
                judges.agree("")
        except _OtherRankError:
            raise FuzzError("", is_clean=True) from None
        except Exception as error:
            if isinstance(error, fsdp2.FSDPError) and error.code in refusals(program):
                if len(judges.agree(error.code)) == 1:
                    return error.code
                told = f"{MARK} | only some ranks refuse | {at}\n{error}"
                raise FuzzError(told, is_clean=False) from error
            told = f"{MARK} | {_signature(op, error)} | {at}\n{error}"
            is_clean = isinstance(error, MismatchError) and bool(judges.agree(told))
            raise FuzzError(told, is_clean) from error
    return ""


class _OtherRankError(Exception):
    """Another rank found something, and this one did not."""


class _Judges:
    """A process group of the fuzzer's own."""

    # By world. A world that was left stays: one whose ranks went apart has collectives that nobody
    # ends, and who lets go of its last group waits for their time-out.
    _made: ClassVar[list[tuple[object, _Judges]]] = []

    def __init__(self) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=60))

    @classmethod
    def of_world(cls) -> _Judges:
        world = dist.group.WORLD
        if not cls._made or cls._made[-1][0] is not world:
            cls._made.append((world, cls()))
        return cls._made[-1][1]

    def agree(self, found: str) -> set[int]:
        """Return what ranks found, as numbers; nothing if not all of them got here.

        Raise if others found something and this one not.
        """
        own = torch.tensor([zlib.crc32(found.encode())])
        gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]  # "": 0
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        if found:
            try:
                work.wait(timedelta(seconds=JUDGES_WAIT_S))
            except RuntimeError:
                return set()
        else:
            work.wait()
        codes = {int(code) for code in gathered}
        if not found and codes != {0}:
            raise _OtherRankError
        return codes


def _signature(op: Op, error: Exception) -> str:
    """Return what tells defects apart: the kind of op, and what differs or where it was raised."""
    name = type(op).__name__ if type(op) is not Op else "building"
    if isinstance(error, MismatchError):
        return f"{name}: {str(error).splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/fsdp2/" in f.filename] or list(frames)[-1:]
    where = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].name}"
    said = re.sub(r"(trees|blocks|inner)\.[\w.]+", "NAME", str(error).partition("\n")[0])
    return f"{name}: {type(error).__name__} in {where}: {re.sub(r'[0-9]+', 'N', said)[:80]}"


def run_programs(programs: Sequence[Program]) -> None:
    """Be the body that `tests.kit.rank` runs.

    What came of each program is told by a skip: "" if all is right, or the code of a refusal, or
    what is wrong. A failure after which ranks are of no use ends the body, and begins with what
    came of the programs before it.
    """
    told: list[str] = []
    for index, program in enumerate(programs):
        print(f"{AT} {index}", flush=True)  # for who finds that this process died
        try:
            told.append(run(program))
        except FuzzError as error:
            if not error.is_clean:
                raise FuzzError(f"{AT} {index} {json.dumps(told)}\n{error}", False) from error
            told.append(str(error) or OTHER_RANK)
    raise pytest.skip.Exception(json.dumps(told)) from None


run_programs.body = run_programs  # type: ignore[attr-defined]  # where a rank looks for it
