"""Promise: `python -m fsdp2 program` runs a program untouched, with ours in place of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.pool import ENVIRONMENT
from tests.kit.torchs_own import with_pause

ROOT = Path(__file__).parents[2]

TRAIN = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def train(rank, size, store):
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 29), torch.nn.Linear(29, 3))
    for part in (*model, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.ones(2, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(model, FSDPModule)
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "FSDPModule"]
    words = [kinds[0].partition(".")[0], f"{loss.item():.6f}", *sys.argv[1:]]
    print(f"rank {rank}: {' '.join(words)}\\n", end="", flush=True)
    dist.barrier()  # gloo may abort a rank whose peer has gone
    dist.destroy_process_group()


"""
BY_LAUNCHER = (
    TRAIN
    + """\
if __name__ == "__main__":
    import os
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
"""
)
BY_SPAWN = (
    TRAIN
    + """\
if __name__ == "__main__":
    import tempfile
    import torch.multiprocessing as mp
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(2, f"file://{folder}/store"), nprocs=2)
"""
)
BY_SUBPROCESS = (
    TRAIN
    + """\
if __name__ == "__main__":
    import subprocess
    if len(sys.argv) == 3:
        train(int(sys.argv[1]), 2, sys.argv[2])
    else:
        runs = [[sys.executable, sys.argv[0], str(rank), sys.argv[1]] for rank in range(2)]
        assert not sum(process.wait() for process in [subprocess.Popen(run) for run in runs])
"""
)


def run(
    *arguments: str, folder: Path, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the package where a user has it."""
    known = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=known,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended


def torchrun(*arguments: str, folder: Path, **environment: str) -> list[str]:
    """Return what two ranks printed, in the order of ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run(*start, *arguments, folder=folder, **environment).stdout.splitlines()
    return sorted(line for line in printed if line.startswith("rank "))


def torchrun_without_fsdp2(*arguments: str, folder: Path) -> list[str]:
    """As ``torchrun``, for what runs on torch's own."""
    return torchrun(*arguments, folder=folder, PYTHONPATH=with_pause(str(ROOT)))


def test_a_program_of_torchs_names_runs_untouched(tmp_path: Path) -> None:
    """By torchrun: which implementation ran, with it and without; the losses are the same."""
    (tmp_path / "train.py").write_text(BY_LAUNCHER)
    ours = torchrun("-m", "fsdp2", "train.py", "--lr", "x", folder=tmp_path)
    theirs = torchrun_without_fsdp2("train.py", "--lr", "x", folder=tmp_path)
    assert [line.split()[2] for line in ours] == ["fsdp2"] * 2
    assert [line.split()[2] for line in theirs] == ["torch"] * 2
    assert [line.split()[3:] for line in ours] == [line.split()[3:] for line in theirs]
    assert ours[0].endswith("--lr x")


@pytest.mark.slow
def test_a_module(tmp_path: Path) -> None:
    package = tmp_path / "client"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(BY_LAUNCHER)
    printed = torchrun("-m", "fsdp2", "-m", "client.train", "a", folder=tmp_path)
    assert [line.split()[2] for line in printed] == ["fsdp2"] * 2
    assert printed[0].endswith(" a")


@pytest.mark.slow
@pytest.mark.parametrize("text", [BY_SPAWN, BY_SUBPROCESS])
def test_processes_that_a_program_starts(tmp_path: Path, text: str) -> None:
    """They have ours too, wherever it lies, and what they begin with anyway."""
    begins = tmp_path / "begins"
    begins.mkdir()
    (begins / "sitecustomize.py").write_text("import sys; sys.began = True")
    where = os.pathsep.join([str(ROOT), str(begins)])
    more = [f"file://{tmp_path}/store"] if text is BY_SUBPROCESS else []
    text = text.replace('print(f"rank', 'assert sys.began; print(f"rank')
    hide = f"os.environ['PYTHONPATH'] = os.environ['PYTHONPATH'].replace({str(ROOT)!r} + ':', '')"
    text = text.replace('__main__":', f'__main__":\n    import os\n    {hide}')
    (tmp_path / "train.py").write_text(text)
    ended = run("-m", "fsdp2", "train.py", *more, folder=tmp_path, PYTHONPATH=where)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("rank ")]
    assert [line.split()[2] for line in lines] == ["fsdp2"] * 2


def test_what_a_process_begins_with_imports_no_torch(tmp_path: Path) -> None:
    startup = str(ROOT / "fsdp2" / "_tools" / "startup")
    code = "import sys; print([name for name in sys.modules if name in ('torch', 'fsdp2')])"
    ended = run("-c", code, folder=tmp_path, PYTHONPATH=startup, FSDP2_REPLACE_TORCH="1")
    assert ended.stdout == "[]\n"


def test_another_file_of_that_name_may_fail(tmp_path: Path) -> None:
    """Python prints what it raised and goes on, and the names are replaced all the same."""
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    where = os.pathsep.join([str(ROOT / "fsdp2" / "_tools" / "startup"), str(ROOT), str(tmp_path)])
    code = "from torch.distributed.fsdp import fully_shard as f; print(f.__module__)"
    ended = run("-c", code, folder=tmp_path, PYTHONPATH=where, FSDP2_REPLACE_TORCH="1")
    assert "RuntimeError: theirs" in ended.stderr
    assert ended.stdout == "fsdp2._core.api.fully_shard\n"


def test_a_program_finds_its_folder_and_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "beside.py").write_text("word = 'found'\n")
    (folder / "main.py").write_text(
        "import sys, beside, pickle, fsdp2, torch.distributed.fsdp as torch_fsdp\n"
        "class Thing: pass\n"
        "assert torch_fsdp.fully_shard is fsdp2.fully_shard\n"
        "assert 'fsdp2._tools.commands' not in sys.modules\n"  # no rank needs it
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "print(__name__, beside.word, sys.argv)\n"
        "sys.exit(3)\n"
    )
    ended = run("-m", "fsdp2", "programs/main.py", "-m", "x", folder=tmp_path, status=3)
    assert ended.stdout == "__main__ found ['programs/main.py', '-m', 'x']\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "found no program"), (["-x"], "found -x"), (["missing.py"], "found no file missing.py")],
)
def test_wrong_calls(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    from fsdp2.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert words in capsys.readouterr().err
    assert ended.value.code == 2


PIPELINE = """\
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
stage_mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
fully_shard(whole, mesh=stage_mesh, reshard_after_forward=False)
stage = PipelineStage(whole, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
x = torch.arange(48.0).view(8, 6) / 48
schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank else {}))
total = sum(p.grad.to_local().abs().sum().item() for p in whole.parameters())
kinds = [kind.__module__ for kind in type(whole).__mro__ if kind.__name__ == "FSDPModule"]
print(f"rank {rank}: {kinds[0].partition('.')[0]} {total:.5f}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_pipelines_that_are_imported_behind_the_names(tmp_path: Path) -> None:
    """Torch's stages find the state of our modules by our accessor as by theirs."""
    (tmp_path / "train.py").write_text(PIPELINE)
    ours = torchrun("-m", "fsdp2", "train.py", folder=tmp_path)
    theirs = torchrun_without_fsdp2("train.py", folder=tmp_path)
    assert [line.split()[2] for line in ours] == ["fsdp2"] * 2
    assert [line.split()[3] for line in ours] == [line.split()[3] for line in theirs]
