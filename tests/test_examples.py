"""Promise: the example trains, saves, resumes bit for bit, stops cleanly and refuses nonsense.

It runs on a tiny model and a small text, in ranks that are forked where torch is imported already,
with the environment that torchrun gives them. In the pool it runs as a user runs it too,
from the command line: once to its end, once to a Ctrl-C, and once with a bad argument.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fsdp2
from fsdp2.checkpoint import _save
from tests.accidents._accidents import MACHINE, Accident, Trial
from tests.accidents._job import write_text
from tests.accidents._trial import tried
from tests.kit.pool import find_free_port

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LIMIT_S = 240
STEPS = 12
HALF = 6
DEAD = 9  # the status of a rank that ends itself


@dataclass(frozen=True)
class Finished:
    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Workplace:
    """A folder with a small text, in which runs leave their checkpoints and losses."""

    folder: Path

    def arguments(self, name: str, *more: str) -> list[str]:
        """Arguments of a tiny run whose files go by `name`."""
        return [
            *("--size", "tiny", "--steps", str(STEPS), "--log-every", "4", "--save-every", "0"),
            *("--sample-bytes", "16", "--held-out-batches", "2", "--device", "cpu"),
            *("--corpus", str(self.folder / "text"), "--cache-dir", str(self.folder / "cache")),
            *("--checkpoint-dir", str(self.checkpoints(name))),
            *("--metrics", str(self.folder / f"{name}.jsonl")),
            *more,
        ]

    def run(self, name: str, *more: str) -> Finished:
        """Run the example to its end, from the command line."""
        return finish(self.start(name, *more))

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLES / "train_lm.py"), *self.arguments(name, *more)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_forked(
        self, name: str, *more: str, ranks: int = 2, dies: str = "", interrupt_at: str = ""
    ) -> Finished:
        """Run the example's ranks, without torchrun; return the largest status, and rank 0's words.

        With `dies` each rank ends itself at that moment of a save. With `interrupt_at` each gets a
        Ctrl-C when rank 0 has printed that.
        """
        arguments = self.arguments(name, "--ranks", str(ranks), *more)
        printed = [str(self.folder / f"{name}.{stream}") for stream in ("stdout", "stderr")]
        port = find_free_port()
        processes = [
            FORKED.Process(target=be_a_rank, args=(rank, ranks, port, arguments, printed, dies))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        if interrupt_at:
            wait_for_words(Path(printed[0]), interrupt_at, processes)
            for process in processes:
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(LIMIT_S)
            if process.exitcode is None:
                process.kill()
                pytest.fail(f"no end after {LIMIT_S} s: {Path(printed[1]).read_text()}")
        status = max(abs(process.exitcode) for process in processes)
        return Finished(status, *(Path(path).read_text() for path in printed))

    def checkpoints(self, name: str) -> Path:
        return self.folder / name

    def latest(self, name: str) -> str:
        return os.readlink(self.checkpoints(name) / "latest")

    def losses(self, name: str) -> dict[int, float]:
        lines = (self.folder / f"{name}.jsonl").read_text().splitlines()
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}

    def copy_checkpoints(self, source: str, target: str) -> None:
        shutil.copytree(self.checkpoints(source), self.checkpoints(target), symlinks=True)


def environment() -> dict[str, str]:
    """The environment for a run: this package importable, and no trace of a launcher above us."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    paths = [part for part in (os.environ.get("PYTHONPATH"), str(ROOT)) if part]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}


FORKED = mp.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.kit.preload"])


def be_a_rank(
    rank: int, count: int, port: int, arguments: list[str], printed: list[str], dies: str
) -> None:
    """Be what torchrun would start; rank 0 prints into the two files."""
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path if rank == 0 else os.devnull, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  # until the process ends
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    if dies:
        die_while_saving(dies)
    status = train_lm.main(arguments)
    sys.stdout.flush()
    sys.exit(status)


def wait_for_words(path: Path, words: str, writers: list[mp.Process]) -> None:
    """Return when a file has the words, or when nobody is left who could write them."""
    give_up = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up and all(writer.exitcode is None for writer in writers):
        if path.exists() and words in path.read_text():
            return
        time.sleep(0.05)


def die_while_saving(moment: str) -> None:
    """Have this process end where a save makes a call."""

    def die(*args: object, **kwargs: object) -> None:
        os._exit(DEAD)

    setattr(_save, moment, die)


def finish(process: subprocess.Popen[str]) -> Finished:
    """Wait for a process to end; a slow one is asked to stop its ranks, then killed."""
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            stdout, stderr = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
        pytest.fail(f"no end after {LIMIT_S} s\n{stdout}\n{stderr}")
    return Finished(process.returncode, stdout, stderr)


def expect_success(finished: Finished) -> str:
    assert finished.status == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("train_lm")
    write_text(folder / "text")
    return Workplace(folder)


@pytest.fixture(scope="module")
def whole_run(workplace: Workplace) -> str:
    """Train all steps on two ranks under the name `whole`; return what was printed."""
    return expect_success(workplace.run_forked("whole"))


@pytest.fixture(scope="module")
def half_run(workplace: Workplace) -> str:
    """Train half of the steps on two ranks under the name `half`."""
    return expect_success(workplace.run_forked("half", "--stop-at", str(HALF)))


def test_trains_saves_and_samples(workplace: Workplace, whole_run: str) -> None:
    losses = workplace.losses("whole")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.5
    assert workplace.latest("whole") == f"step-{STEPS:08d}"
    for expected in ("blocks.1 ", "shard bytes", f"step     {STEPS}/{STEPS}", "tokens/s", "peak"):
        assert expected in whole_run
    assert whole_run.count("held-out loss") == 2
    assert "--- sample ---\ndef read_lines(path):\n" in whole_run


def sample_in(printed: str) -> str:
    return printed.split("--- sample ---")[1].split("--- end of sample ---")[0]


def test_draws_its_plan_and_its_last_steps(workplace: Workplace, whole_run: str) -> None:
    folder = workplace.folder / "whole-pages"
    drawn = [f"drew {folder}/{page}.html: open it in a browser\n" for page in ("plan", "recording")]
    assert whole_run.endswith("".join(drawn))
    assert "over 2 ranks (2)" in (folder / "plan.html").read_text()
    assert "Recording of Transformer" in (folder / "recording.html").read_text()
    found = fsdp2.read_recordings(folder / "steps")
    assert found.ranks == (0, 1)
    assert [len(steps) for steps in found.steps.values()] == [8, 8]


@pytest.mark.slow
def test_trains_from_the_command_line(workplace: Workplace, whole_run: str) -> None:
    printed = expect_success(workplace.run("by-hand"))
    assert workplace.losses("by-hand") == workplace.losses("whole")
    assert workplace.latest("by-hand") == f"step-{STEPS:08d}"
    assert sample_in(printed) == sample_in(whole_run)


def test_resume_is_bit_for_bit(workplace: Workplace, whole_run: str, half_run: str) -> None:
    workplace.copy_checkpoints("half", "resumed")
    printed = expect_success(workplace.run_forked("resumed", "--resume"))
    whole, half, resumed = (workplace.losses(name) for name in ("whole", "half", "resumed"))
    assert list(resumed) == list(range(HALF + 1, STEPS + 1))
    assert half | resumed == whole
    assert sample_in(printed) == sample_in(whole_run)


OTHER_MESHES = ["1", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("4", "2x2"))]


@pytest.mark.parametrize("mesh", OTHER_MESHES)
def test_resume_on_another_mesh(
    workplace: Workplace, whole_run: str, half_run: str, mesh: str
) -> None:
    """By itself: under torchrun, which starts ranks again, a run goes on unless told not to."""
    name, count = f"resumed-on-{mesh}", 1 if mesh == "1" else 4
    workplace.copy_checkpoints("half", name)
    printed = expect_success(workplace.run_forked(name, "--mesh", mesh, ranks=count))
    assert f"resumed from {workplace.checkpoints(name)}/step-{HALF:08d}, " in printed
    whole, resumed = workplace.losses("whole"), workplace.losses(name)
    assert list(resumed) == list(range(HALF + 1, STEPS + 1))
    for step, loss in resumed.items():
        assert loss == pytest.approx(whole[step], rel=1e-4), step


@pytest.mark.slow
def test_bf16_stays_near_fp32(workplace: Workplace, whole_run: str) -> None:
    expect_success(workplace.run_forked("bf16", "--dtype", "bf16"))
    whole, bf16 = workplace.losses("whole"), workplace.losses("bf16")
    assert bf16 != whole
    for step, loss in bf16.items():
        assert loss == pytest.approx(whole[step], rel=0.05), step


def test_eight_bits_stay_near_fp32(workplace: Workplace, whole_run: str) -> None:
    expect_success(workplace.run_forked("eight", "--dtype", "fp8", "--gradients", "int8"))
    whole, eight = workplace.losses("whole"), workplace.losses("eight")
    assert eight != whole
    for step, loss in eight.items():
        assert loss == pytest.approx(whole[step], rel=0.05), step


@pytest.mark.slow
def test_compiled_resumes_what_ran_eagerly(
    workplace: Workplace, whole_run: str, half_run: str
) -> None:
    """A compiled run goes on from an eager run's checkpoint, ends where that one does, samples."""
    workplace.copy_checkpoints("half", "compiled")
    printed = expect_success(workplace.run_forked("compiled", "--resume", "--compile", "aot_eager"))
    assert "--- sample ---\ndef read_lines(path):\n" in printed
    whole, compiled = workplace.losses("whole"), workplace.losses("compiled")
    assert list(compiled) == list(range(HALF + 1, STEPS + 1))
    for step, loss in compiled.items():
        assert loss == pytest.approx(whole[step], rel=1e-4), step


def check_interrupted(workplace: Workplace, name: str, finished: Finished) -> None:
    """A Ctrl-C left a checkpoint of the last step, words that say so, and the status of one."""
    assert finished.status == 130, finished
    assert "Traceback" not in finished.stderr
    assert "continue with --resume" in finished.stdout
    last_step = max(workplace.losses(name))
    assert workplace.latest(name) == f"step-{last_step:08d}"


def test_an_interrupt_saves(workplace: Workplace) -> None:
    steps = ("--steps", "1000000")
    finished = workplace.run_forked("interrupted", *steps, interrupt_at="\nstep ")
    check_interrupted(workplace, "interrupted", finished)


@pytest.mark.slow
def test_interrupt_saves_and_ends_with_130(workplace: Workplace) -> None:
    process = workplace.start("launched", "--steps", "1000000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    check_interrupted(workplace, "launched", finish(process))


@pytest.mark.slow
def test_bad_arguments_are_refused_once_before_any_rank_starts(workplace: Workplace) -> None:
    finished = workplace.run("refused", "--ranks", "3")
    assert finished.status == 2
    assert finished.stdout == ""
    assert finished.stderr.splitlines() == [
        "train_lm.py: error: --batch-size 8 does not divide evenly over 3 ranks: "
        "choose a multiple of 3",
        "(--help lists the options)",
    ]


def refusals(cases: list[list[str]], path: str) -> None:
    """Parse each command line in a process of its own; write statuses and messages."""
    sys.path.insert(0, str(EXAMPLES))
    from _options import parse_options

    found = []
    for arguments in cases:
        message, status = io.StringIO(), 0
        try:
            with contextlib.redirect_stderr(message):
                parse_options(arguments)
        except SystemExit as end:
            status = end.code
        found.append([status, message.getvalue()])
    Path(path).write_text(json.dumps(found))


def test_each_bad_argument_has_a_clear_message(workplace: Workplace, half_run: str) -> None:
    cases = [
        (["--ranks", "2", "--mesh", "2x2"], "--mesh 2x2 needs 4 ranks, found 2"),
        (["--ranks", "3"], "--batch-size 8 does not divide evenly over 3 ranks: choose a multiple"),
        (["--mesh", "2x"], "invalid mesh (SHARD or REPLICATExSHARD, for example 4 or 2x2)"),
        (["--mesh", "2x2x2"], "invalid mesh"),
        (["--mesh", "0"], "invalid mesh"),
        (["--steps", "0"], "--steps must be at least 1, found 0"),
        (["--lr", "nan"], "--lr must be above 0, found nan"),
        (["--weight-decay", "-1"], "--weight-decay must be 0 or more"),
        (["--size", "huge"], "--size: invalid choice"),
        (["--dtype", "fp4"], "--dtype: invalid choice"),
        (["--corpus", "absent"], "--corpus absent is not a folder"),
        (["--corpus", str(workplace.folder / "cache")], "pass a folder with more .py files"),
        (["--resume"], "--resume: no checkpoint in"),
        (["--resume", "never"], "--resume: invalid choice"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (
            ["--resume", "--checkpoint-dir", str(workplace.checkpoints("half")), "--seed", "5"],
            "was saved with seed 0, but this run has 5",
        ),
    ]
    arguments = [workplace.arguments("refused", *more) for more, _ in cases]
    path = workplace.folder / "refusals.json"
    process = FORKED.Process(target=refusals, args=(arguments, str(path)))
    process.start()
    process.join(LIMIT_S)
    for (more, expected), (status, message) in zip(
        cases, json.loads(path.read_text()), strict=True
    ):
        assert status == 2, more
        assert expected in message, more
        assert message.startswith("train_lm.py: error: "), more
        assert len(message.splitlines()) == 2, more


@pytest.mark.parametrize(
    ("moment", "survivor"),
    [
        pytest.param("write_part", HALF, marks=pytest.mark.slow),
        pytest.param("give_name", HALF, marks=pytest.mark.slow),
        pytest.param("keep_newest", STEPS - 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_dies_while_it_saves_goes_on_by_itself(
    workplace: Workplace, whole_run: str, half_run: str, moment: str, survivor: int
) -> None:
    """Under torchrun, as it starts ranks again: from the newest checkpoint that is whole."""
    name = f"dies-at-{moment}"
    workplace.copy_checkpoints("half", name)
    stop = ("--stop-at", str(STEPS - 1))
    finished = workplace.run_forked(name, *stop, ranks=1, dies=moment)
    assert finished.status == DEAD, finished
    (workplace.folder / f"{name}.jsonl").unlink()

    printed = expect_success(workplace.run_forked(name, ranks=1))
    assert f"resumed from {workplace.checkpoints(name)}/step-{survivor:08d}, " in printed
    assert list(workplace.losses(name)) == list(range(survivor + 1, STEPS + 1))
    assert workplace.losses(name)[STEPS] == pytest.approx(
        workplace.losses("whole")[STEPS], rel=1e-4
    )
    names = {path.name for path in workplace.checkpoints(name).iterdir()}
    assert names == {"latest", f"step-{survivor:08d}", f"step-{STEPS:08d}"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL of a worker", MACHINE])
def test_accidents_under_torchrun(tmp_path: Path, kind: str) -> None:
    """Workers go on where the last save was, on as many ranks as are left."""
    write_text(tmp_path / "text")
    trial = Trial(seed=0, nproc=1, accidents=(Accident(kind, step=10, seconds=0.05),))
    outcome = tried(trial, tmp_path)
    assert not outcome.fault
    assert outcome.segments[-1].ranks == (1 if kind == MACHINE else 2)


def test_example_needs_nothing_of_torchs_own_sharding() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert "torch.distributed.fsdp" not in path.read_text(), path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_trains_on_cuda(workplace: Workplace) -> None:
    more = ("--device", "cuda", "--ranks", "1", "--dtype", "bf16", "--deterministic")
    expect_success(workplace.run("cuda", *more))
    losses = workplace.losses("cuda")
    assert losses[STEPS] < losses[1] - 0.5
