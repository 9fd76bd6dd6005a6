"""What ranks run: a program, op by op, and what it says when something is wrong."""

from __future__ import annotations

import re
import traceback
import warnings
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.fuzz._ops import PERFORM
from tests.fuzz._pair import MismatchError, Pair
from tests.fuzz._program import Op, Program

MARK = "FUZZ FOUND"
JUDGES_WAIT_S = 8.0  # for ranks that may be waiting for this one, elsewhere


class FuzzError(AssertionError):
    """A program went wrong; the first line of the message is what `signature_of` reads.

    `is_clean`: nothing but a comparison failed, and all ranks are at the same place, so they are
    fit to run another program.
    """

    def __init__(self, told: str, is_clean: bool) -> None:
        super().__init__(told)
        self.is_clean = is_clean


def run(program: Program) -> None:
    """Run a program on this rank.

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
            told = f"{MARK} | {_signature(op, error)} | {at}\n{error}"
            is_clean = isinstance(error, MismatchError) and judges.agree(told)
            raise FuzzError(told, is_clean) from error


class _OtherRankError(Exception):
    """Another rank found something, and this one did not."""


class _Judges:
    """A process group of the fuzzer's own."""

    _made: tuple[object, _Judges] | None = None

    def __init__(self) -> None:
        self._group = dist.new_group(timeout=timedelta(seconds=60))

    @classmethod
    def of_world(cls) -> _Judges:
        world = dist.group.WORLD
        if cls._made is None or cls._made[0] is not world:
            cls._made = (world, cls())
        return cls._made[1]

    def agree(self, found: str) -> bool:
        """Return True if all ranks got here. Raise if others found something and this one not."""
        own = torch.tensor([zlib.crc32(found.encode())])
        gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        if found:
            try:
                work.wait(timedelta(seconds=JUDGES_WAIT_S))
            except RuntimeError:
                return False
            return True
        work.wait()
        if any(code.item() for code in gathered):
            raise _OtherRankError
        return True


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


def run_program(program: Program) -> None:
    """Be the body that `tests._rank` runs. What is fit for the next program says so by a skip."""
    try:
        run(program)
    except FuzzError as error:
        if error.is_clean:
            raise pytest.skip.Exception(str(error)) from None
        raise


run_program.body = run_program  # type: ignore[attr-defined]  # where a rank looks for it
