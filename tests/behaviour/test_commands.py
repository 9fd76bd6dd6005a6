"""Promise: `python -m fsdp2 plan`, `report` and `explain` say what is asked, or what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2
from fsdp2.__main__ import main
from fsdp2._core.base.names import in_a_line
from fsdp2._tools import commands
from fsdp2._tools.pages.content import Fact, Page, Table
from fsdp2._tools.plan import command
from tests.kit import sample_pages as samples

ROOT = Path(__file__).parents[2]

MODEL = """\
import torch
import torch.nn as nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

class Sized(nn.Module):
    def __init__(self, width, *, depth=2, **more):
        super().__init__()

def build():
    return Net()

def batch():
    return torch.zeros(4, 16, dtype=torch.long)

not_callable = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_of_commands.py").write_text(MODEL)
    (tmp_path / "broken_of_commands.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy_of_commands", raising=False)
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["plan", *words])
    return capsys.readouterr().out


def test_a_plan_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    by_class = plan(capsys, "toy_of_commands:build", "--mesh", "2x4", "--policy", "Block")
    assert "blocks.0 (6 times)" in by_class
    assert "over 8 ranks (2 x 4), as on rank 0" in by_class
    by_name = plan(capsys, "toy_of_commands:Net", "--mesh", "2x4", "--units", "blocks.*")
    assert by_name == by_class
    inside = plan(capsys, "toy_of_commands:Net", "--mesh", "8", "--units", "blocks.0.up,embed")
    assert [line.split()[0] for line in inside.splitlines()[3:6]] == [
        "<root>",
        "embed",
        "blocks.0.up",
    ]


def test_a_plan_of_a_step(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    words = ["toy_of_commands:build", "--mesh", "4", "--policy", "Block", "--optimizer", "AdamW"]
    words += ["--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--memory", "low"]
    by_shape = plan(capsys, *words, "--batch", "4x16:int64")
    assert "all_gather: 13 a step" in by_shape
    assert plan(capsys, *words, "--batch", "toy_of_commands:batch") == by_shape
    offloaded = plan(capsys, *words, "--batch", "4x16:int64", "--offload", "--rank", "3")
    assert "as on rank 3" in offloaded
    again = plan(capsys, *words, "--batch", "4x16:int64", "--activation-checkpointing")
    assert "all_gather: 13 a step" in again
    assert again != by_shape


def test_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["toy_of_commands:build", "--mesh", "4", "--batch", "4x16:int64"]
    scaled = ["--policy", "Block", "--compute", "0.7", "--links", "0.8"]
    printed = plan(capsys, *words, "--advice", *scaled)
    assert "peaks" not in printed
    assert "no advice" in printed
    printed = plan(capsys, *words, "--advice", "--budget", "1KB")
    assert "at the machine's peak rates" in printed
    assert "no advice" not in printed
    assert "\n\nthe step: does not fit: it takes " in printed
    assert "becomes" in printed


def test_a_page_and_suggestions(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    printed = plan(
        capsys,
        *("toy_of_commands:build", "--mesh", "4", "--policy", "Block", "--batch", "4x16:int64"),
        *("--budget", "10MB", "--html", "plan.html"),
    )
    assert "\nfits: model.set_memory('fast'), peak " in printed
    assert printed.endswith("wrote plan.html\n")
    assert (here / "plan.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [name for name in os.listdir(here) if name.startswith(".plan")] == []


def test_a_verdict_stands_first_and_nothing_long_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SECONDS_OF_A_MODULE", 1.0)
    words = ["toy_of_commands:build", "--mesh", "4x8", "--policy", "Block", "--batch", "4x16:int64"]
    main(["plan", *words])
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("fits: ")
    assert lines[1].startswith("on h100-nvlink-ib by default")
    assert "4 replicas, each sharded over 8 ranks; mesh=32 (--mesh 32) shards over all 32" in lines
    assert shown.err.splitlines()[0] == "planning the requested step: about 13 s"
    main(["plan", *words, "--budget", "400KB", "--hardware", "cpu"])
    shown = capsys.readouterr()
    assert shown.out.startswith("does not fit: ")
    assert "none of the tried settings fits" in shown.out or " fits (" in shown.out.splitlines()[0]
    assert "  does not fit: model.set_memory('balanced')" in shown.err


def test_a_shape_needs_no_code(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 172, "vocab_size": 1009}
    (here / "config.json").write_text(json.dumps(config))
    shown = plan(capsys, "config.json", "--mesh", "8", "--batch", "2", "--hardware", "h200")
    assert " of 139.7 GiB at " in shown.splitlines()[0]
    assert "layers.0 (2 times)" in shown
    assert "tokens/s a rank" in shown
    assert (
        plan(capsys, str(here), "--mesh", "8", "--batch", "2x4096", "--hardware", "h200") == shown
    )
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = capsys.readouterr().out
    assert "llama3-70b" in told
    assert "h100-nvlink-ib" in told


def test_explain_loads_no_torch() -> None:
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fsdp2", "explain", "FS102"],
        env=where,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("FS102: ")
    assert " torch" not in told.stderr


TWO, LARGE = "toy_of_commands:build --mesh 2", "999999999999x99999999999"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("toy_of_commands --mesh 2", "expected package.module:name, found 'toy_of_commands'"),
        ("toy_of_commands:nope --mesh 2", "toy_of_commands has no 'nope'; it has torch, nn, Block"),
        ("nowhere.at:all --mesh 2", "found no module 'nowhere'"),
        ("toy_of_commands:not_callable --mesh 2", "is a int, which cannot be called"),
        ("toy_of_commands:batch --mesh 2", "returned a Tensor, which is not a module"),
        ("toy_of_commands:Sized --mesh 2", "needs width: pass a function that returns a module"),
        ("toy_of_commands:build", "required: --mesh"),
        ("toy_of_commands:build --mesh 2x2x2", "found '2x2x2'"),
        ("toy_of_commands:build --mesh 0", "found '0'"),
        (f"{TWO} --rank 2", "found 2"),
        (f"{TWO} --policy Blok", "'Blok'; the model has Embedding"),
        (f"{TWO} --units blocks.*,hed", "'hed'; the model has embed"),
        (f"{TWO} --policy Block --units x", "not allowed with"),
        (f"{TWO} --batch 4x:int64", "as 4x128:int64, found '4x:int64'"),
        (f"{TWO} --batch 4:intx", "found 'intx'"),
        (f"{TWO} --batch {LARGE}:int64", f"a valid shape and dtype, found '{LARGE}:int64'"),
        (f"{TWO} --batch {'9' * 5000}:int64", "a valid shape and dtype"),
        (f"{TWO} --batch 4x16:int64,", "as 4x128:int64, found ''"),
        ("llama3-8b --mesh 8 --batch 2,8192", "write 2x8192 for"),
        (f"{TWO} --hardware cpu --links 0.5", "pass --hardware"),
        (f"{TWO} --compute 0", "above 0"),
        (f"toy_of_commands:build --mesh {'9' * 5000}", "found '99999"),
        ("toy_of_commands:build --mesh 999999999999x999999999999", "ranks"),
        ("toy_of_commands:build --mesh ²", "found '²'"),
        (f"{TWO} --rank -1", "found -1"),
        (f"{TWO} --rank {'9' * 40}", "found"),
        (f"{TWO} --memory 1.2.3GB", "1.2.3GB"),
        (f"{TWO} --memory {'9' * 400}GB", "99999"),
        (f"{TWO} --batch 4x16:int64 --budget x", "x"),
        (f"{TWO} --batch 4x16:int64 --budget {'9' * 400}GB", "999"),
        (f"{TWO} --batch 4x16:int64 --hardware none", "none"),
        ("toy_of_commands:build\x1b[2J --mesh 2", "toy_of_commands has no 'build"),
        (f"{TWO} --batch 4x16:int64,4x16:int64", "a step of the model failed"),
        (f"{TWO} --optimizer Nope", "torch.optim has no 'Nope'"),
        (f"{TWO} --param-dtype half8", "found 'half8'"),
        (f"{TWO} --memory some", "some"),
        (f"{TWO} --html no/folder.html", "no/folder.html"),
        (f"{TWO} --pol Block", "unrecognized arguments: --pol"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], words: str, found: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words.split()])
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert found in printed.splitlines()[-1]
    assert "Traceback" not in printed


def test_what_a_users_module_raises_is_seen() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["plan", "broken_of_commands:build", "--mesh", "2"])


RECORDED = """\
import torch, torch.distributed as dist, fsdp2
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
for layer in (*model, model):
    fsdp2.fully_shard(layer)
with fsdp2.record(model, "run"):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def test_a_report(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", RECORDED], cwd=here, env=where, check=True)
    # another test may have loaded it, and a program that asks for a report has not
    monkeypatch.delitem(vars(fsdp2), "read_recordings", raising=False)
    main(["report", "run", "--html", "a.html", "--trace", "a.json", "--rows", "a.jsonl"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Recording of Sequential"
    assert "steps: 3" in printed
    assert printed[-3:] == ["wrote a.json", "wrote a.jsonl", "wrote a.html"]
    assert all((here / f"a.{kind}").stat().st_size > 0 for kind in ("html", "json", "jsonl"))


def test_a_report_has_what_a_page_says() -> None:
    lines = list(commands._lines(samples.SMALL))
    assert lines[:3] == [samples.SMALL.title, samples.SMALL.subtitle, ""]
    assert "step: 11.9 ms (predicted, 82 % compute)" in lines
    assert lines[lines.index("Collectives of a step") + 1 :][:3] == [
        "kind            number     bytes    time",
        "all_gather          23  25.1 MiB  1.9 ms",
        "reduce_scatter       9  13.2 MiB    1 ms",
    ]
    assert "note: blocks.3 is gathered again in backward, as the others are." in lines


def test_a_name_of_a_file_is_no_command_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Units, hosts and models have any names, and a recording may be somebody else's."""
    escape = "\x1b[2J\x1b]0;owned\x07\r\n\u202e\ud800"
    table = Table("heading", ("unit", "n"), ((f"a{escape}", "1"), ("plain", "2")))
    page = Page(f"of {escape}", "", tables=(table,), facts=(Fact(f"f{escape}", "v", escape),))
    printed = "\n".join(map(in_a_line, commands._lines(page)))
    assert all(line.isprintable() for line in printed.split("\n"))
    assert "a\\x1b[2J\\x1b]0;owned\\x07\\r\\n\\u202e\\ud800  1" in printed
    with pytest.raises(SystemExit):
        main(["report", "no\x1b[2Jfolder"])
    assert "no\\x1b[2Jfolder" in capsys.readouterr().err


def test_report_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "no_such_folder"])
    assert ended.value.code == 2
    assert "python -m fsdp2 report: error:" in capsys.readouterr().err


def test_a_program_of_a_commands_name(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "report").write_text("print('a program')")
    monkeypatch.setattr("fsdp2.replace_torch", lambda: None)
    monkeypatch.setattr("fsdp2.__main__._reach_children", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x"])
    main(["./report"])
    assert capsys.readouterr().out == "a program\n"


# explain


def test_a_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """By its code, or by a message that has it: without the marks of Markdown, except of code."""
    main(["explain", "FS402"])
    told = capsys.readouterr().out
    assert told.startswith("FS402: Another rank did not take part")
    assert "How you get here. Only one rank called `save`" in told
    assert "**" not in told
    for numbers in (["402"], ["402, 402"], ["402", "402"]):
        main(["explain", *numbers])
        assert capsys.readouterr().out == told
    main(["explain", "StateError: a collective: ... start all ranks again. [fs402]"])
    assert capsys.readouterr().out == told


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain"])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("FS101  An argument has the wrong type")
    assert len(told) > 100


@pytest.mark.parametrize(
    ("given", "said"), [("FS999", "has no FS999"), ("nothing", "expected a code such as FS104")]
)
def test_a_code_that_is_none(capsys: pytest.CaptureFixture[str], given: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
