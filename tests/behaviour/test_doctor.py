"""Promise: `python -m fsdp2 doctor` says that all is well, or names what is wrong and where."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2.__main__ import main
from fsdp2._tools.doctor import advice, fast, installed, machine, run
from fsdp2._tools.doctor.verdicts import (
    NOT_MEASURED,
    OK,
    WARNING,
    WRONG,
    Findings,
    Setting,
    Verdict,
    exit_status,
)
from tests.kit import doctor_faults as faults
from tests.kit.pool import ENVIRONMENT, ranks

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 180


def verdicts_of(path: Path) -> dict[str, tuple[str, str]]:
    """Return what the doctor's file says of each check; the worst of several lines counts."""
    found: dict[str, tuple[str, str]] = {}
    order = (OK, NOT_MEASURED, WARNING, WRONG)
    for one in json.loads(path.read_text())["verdicts"]:
        known = found.get(one["name"], (OK, ""))
        if order.index(one["status"]) >= order.index(known[0]):
            found[one["name"]] = one["status"], one["said"]
    return found


def quietly(fault: str, checks: str, *words: object) -> tuple[int, str]:
    """Run the doctor on this rank; return its exit status, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = faults.doctor(fault, checks, *map(str, words))
    return status, out.getvalue()


# All is well.


@ranks(2, with_process_group=False, limit_s=120.0)
def test_all_is_right_on_ranks_that_are_well(tmp_path: Path, rank: int) -> None:
    """What is printed, the file and the page; times are for those who run it."""
    file, page = tmp_path / "doctor.json", tmp_path / "doctor.html"
    words = ["--quick", "--json", file, "--html", page, "--checkpoint", tmp_path]
    status, said = quietly("nothing", "collectives,fp32,bf16,HSDP,checkpoint", *words)
    assert status == 0
    if rank:
        assert said == ""  # one rank tells
        return
    lines = said.splitlines()
    assert lines[0] == "Correctness"
    assert lines[-2:] == [f"wrote {page}", f"wrote {file}"]
    assert lines[-3].startswith("PASSED: 5 ok, 1 not measured")
    found = verdicts_of(file)
    said = "all ranks are on one host; --hsdp divides them into two replicas"
    assert found["HSDP"] == (NOT_MEASURED, said)
    well = {"collectives", "fp32", "same arithmetic", "bf16", "checkpoint"}
    assert {name for name, (status, _) in found.items() if status == OK} == well
    assert "torch's FSDP2 within" in found["fp32"][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doctor.html", "doctor.json"]
    assert "Correctness" in page.read_text()


@pytest.mark.slow
@ranks(4, with_process_group=False, limit_s=240.0)
def test_every_check_runs_and_says_something(tmp_path: Path, rank: int) -> None:
    file = tmp_path / "doctor.json"
    words = ["--seconds", 1, "--hsdp", "--json", file, "--checkpoint", tmp_path]
    quietly("nothing", "all", *words)
    if rank:
        return
    found = verdicts_of(file)
    wrong = {name for name, (status, _) in found.items() if status == WRONG}
    assert wrong <= {"slow rank", "links"}  # others may use this machine
    assert found["HSDP 2 x 2"][0] == OK
    assert found["operations"][0] == OK
    values = json.loads(file.read_text())
    assert {one["what"] for one in values["settings"]} >= {"memory and prefetch", "zero-copy size"}
    planned = fsdp2.plan(torch.nn.Linear(8, 8), mesh=2, batch=torch.zeros(2, 8), hardware=str(file))
    assert planned.hardware is not None
    assert planned.hardware.name == "doctor"
    assert planned.hardware.to_values() == values["hardware"]


@pytest.mark.slow
@ranks(4, with_process_group=False, limit_s=240.0)
def test_ranks_of_two_hosts(tmp_path: Path, rank: int) -> None:
    """As a launcher tells of two hosts: replicas are tried, and links between hosts are apart."""
    file = tmp_path / "doctor.json"
    words = ["--seconds", 1, "--json", file, "--checkpoint", tmp_path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank // 2))
        quietly("nothing", "limits,links,HSDP,plan", *words)
    if rank == 0:
        values = json.loads(file.read_text())
        said = [one["said"] for one in values["verdicts"] if one["name"] == "links"]
        assert ["within a host" in said[0], "between hosts" in said[1]] == [True, True]
        assert verdicts_of(file)["HSDP 2 x 2"][0] == OK
        assert [one["host"] for one in values["measured"]["limits"]] == [0, 0, 1, 1]
        assert values["hardware"]["ranks_per_node"] == 2
        assert values["hardware"]["near"] != values["hardware"]["far"]


@ranks(1, with_process_group=False)
def test_one_rank_says_how_all_are_measured(tmp_path: Path) -> None:
    status, said = quietly("nothing", "collectives,fp32,clocks", "--checkpoint", tmp_path)
    assert status == 0
    assert "torchrun --nproc-per-node N -m fsdp2 doctor" in said
    assert "not measured collectives: requires at least two ranks" in said


@pytest.mark.slow
@ranks(2, with_process_group=False, limit_s=240.0, device="sim")
def test_a_device_that_is_simulated(tmp_path: Path, rank: int) -> None:
    """And no stream of a doctor's steps reads what another one has not written yet."""
    file = tmp_path / "doctor.json"
    words = ["--seconds", 1, "--json", file, "--checkpoint", tmp_path]
    quietly("nothing", "collectives,fp32,bf16,checkpoint,steps,plan", *words)
    if rank == 0:
        found = verdicts_of(file)
        assert {status for status, _ in found.values()} <= {OK, WARNING, NOT_MEASURED}
        assert found["fp32"][0] == found["bf16"][0] == found["checkpoint"][0] == OK
        assert found["peak"][0] == found["launches"][0] == NOT_MEASURED


# Faults that a process can have.

NAMED = {
    "slow_rank": ("slow rank", WRONG, "rank 1 takes "),
    "divide_factor": ("fp32", WRONG, "the factor of 0.5 indicates a wrong divisor"),
    "other_version": ("versions", WRONG, "rank 1 has 2.12.1+other"),
    "mixed_folders": ("package", WRONG, "on rank 1 modules come from different folders"),
    "other_precision": ("precision", WRONG, "float32 matmul precision: highest on rank 0; medium"),
    "other_arithmetic": ("same arithmetic", WRONG, "losses of the unsharded model on rank 1"),
    "corrupting_link": ("collectives", WRONG, "all_gather corrupts known integers: on rank 1"),
    "corrupting_comm": ("fp32", WRONG, "torch's FSDP2 is correct, so the cause is fsdp2 or a hook"),
    "clock": ("clocks", WARNING, "the clock of rank 1 differs from rank 0's by +120 s"),
    "threads": ("threads", WARNING, "threads of 2 ranks on"),
    "raising": ("collectives", WRONG, "rank 1 raised MemoryError: no memory on this rank"),
}
CHECK_OF = {"threads": "limits", "precision": "settings", "same arithmetic": "fp32"}


@pytest.mark.parametrize("fault", NAMED)
@ranks(2, with_process_group=False, limit_s=120.0)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path, rank: int) -> None:
    name, status, words = NAMED[fault]
    file = tmp_path / "doctor.json"
    given = ["--json", file, "--checkpoint", tmp_path, "--timeout", 8]
    ended, _ = quietly(fault, f"{CHECK_OF.get(name, name)},checkpoint", *given)
    assert ended == (1 if status == WRONG else 0)
    if rank:
        return
    found = verdicts_of(file)
    assert found[name][0] == status
    assert words in found[name][1]
    assert ("wrong divisor" in found[name][1]) == (fault == "divide_factor")
    assert found["checkpoint"][0] == OK or fault == "corrupting_comm"  # it went on


@ranks(2, with_process_group=False, limit_s=120.0)
def test_a_folder_that_ranks_do_not_share_is_named(tmp_path: Path, rank: int) -> None:
    file, own = tmp_path / "doctor.json", tmp_path / f"of-rank-{rank}"
    own.mkdir()
    ended, _ = quietly("nothing", "checkpoint", "--json", file, "--checkpoint", own)
    assert ended == 1
    if rank == 0:
        said = verdicts_of(file)["checkpoint"][1]
        assert f"write to {own} are not visible to ranks 0, 1: a checkpoint needs" in said
    assert list(own.iterdir()) == []


# Faults that need processes, or namespaces, of their own.


DOCTOR = [sys.executable, "-m", "tests.kit.doctor_faults"]


def environment(world_size: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Return the variables of a launcher, but those that tell ranks apart."""
    given = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(world_size)}
    given |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return {**os.environ, **ENVIRONMENT, **given}


def start(*words: str, of_second: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """Start the doctor on two ranks, with a fault; ``of_second`` has variables of the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = environment(2, free.getsockname()[1])
    return [
        subprocess.Popen(
            [*DOCTOR, *words],
            cwd=ROOT,
            env={**shared, "RANK": rank, "LOCAL_RANK": rank, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, own in (("0", {}), ("1", of_second or {}))
    ]


def test_a_rank_that_stops_is_named() -> None:
    first, second = start("stopped", "limits,fp32,bf16", "--timeout", "8")
    try:
        said, _ = first.communicate(timeout=LIMIT_S)
        assert first.returncode == 1, said
    finally:
        second.send_signal(signal.SIGKILL)
        second.communicate()
    assert "ok           open files" in said
    assert "wrong        ranks: rank 1 did not answer within 8 s in fp32" in said
    assert "not measured bf16: lost rank 1" in said


def test_another_package_on_one_rank_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fsdp2", tmp_path / "fsdp2")
    with (tmp_path / "fsdp2" / "debug.py").open("a") as file:
        file.write("# of another version\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    # without the working directory, which `python -m` puts before all others
    both = start("nothing", "package", of_second={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})
    try:
        said = "".join(process.communicate(timeout=LIMIT_S)[0] for process in both)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [1, 1], said
    expected = f"rank 1 runs a different fsdp2: the files in {tmp_path / 'fsdp2'} differ"
    assert expected in said


IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]

NETWORK = """\
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip link add bridge type bridge && ip link set bridge up
for i in 0 1 2; do
  ip netns add rank$i && ip link add of$i type veth peer name eth0 netns rank$i
  ip link set of$i master bridge up
  ip -n rank$i addr add 10.9.0.$((i + 1))/24 dev eth0
  ip -n rank$i link set eth0 up && ip -n rank$i link set lo up
done
ip netns exec rank1 tc qdisc add dev eth0 root tbf rate 200mbit burst 256kb latency 400ms
for i in 0 1 2; do
  RANK=$i LOCAL_RANK=$i ip netns exec rank$i "$@" > "$SAID/$i" 2>&1 &
done
wait
"""


def allows(*command: str) -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    return subprocess.run([*IN_NAMESPACE, *command], capture_output=True).returncode == 0


@pytest.mark.skipif(not allows("sh", "-c", NETWORK.partition("ip netns exec")[0]), reason="rights")
def test_a_throttled_link_is_named(tmp_path: Path) -> None:
    """200 Mbit/s out of one rank's namespace."""
    known = environment(3, 29512, "10.9.0.1")
    known |= {"SAID": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0"}
    subprocess.run(
        [*IN_NAMESPACE, "sh", "-e", "-c", NETWORK, "sh", *DOCTOR, "nothing", "links"],
        cwd=ROOT, env=known, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    said = (tmp_path / "0").read_text()
    assert "wrong        links: slow within a host: 1 to 0, 1 to 2" in said
    assert said.partition("links: ")[2].splitlines()[0].endswith(": all links from rank 1")


@pytest.mark.skipif(not allows("mount", "-t", "tmpfs", "tmpfs", "/mnt"), reason="rights")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    command = [*DOCTOR, "nothing", "limits,checkpoint", "--checkpoint", str(tmp_path)]
    mount = f'mount -t tmpfs -o size=160k tmpfs "{tmp_path}" && exec "$@"'
    known = environment(1, 29513) | {"RANK": "0"}
    ended = subprocess.run(
        [*IN_NAMESPACE, "sh", "-c", f"ip link set lo up && {mount}", "sh", *command],
        cwd=ROOT, env=known, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "rank 0 cannot write to the folder" in ended.stdout
    assert "No space left on device" in ended.stdout
    assert "warning      disk: " in ended.stdout


# What is said of figures, without ranks.


def test_slow_links_are_told_from_slow_ranks() -> None:
    """Sixteen ranks on two hosts; links between hosts are slower, and that is no fault."""
    hosts = [0] * 8 + [1] * 8

    def rate(source: int, target: int) -> float:
        return 2e10 if hosts[source] == hosts[target] else 1e9

    def found(bad: set[tuple[int, int]]) -> list[Any]:
        rates = [
            {str(s): rate(s, t) / (8 if (s, t) in bad else 1) for s in range(16) if s != t}
            for t in range(16)
        ]
        return [{"rates": one, "hosts": hosts} for one in rates]

    well = list(machine.judge_pairs(found(set())))
    assert [one.status for one in well] == [OK, OK]
    one_pair = list(machine.judge_pairs(found({(9, 3)})))
    assert [one.status for one in one_pair] == [OK, WRONG]
    assert "slow between hosts: 9 to 3 (0.125 GB/s; median: 1 GB/s)" in one_pair[1].said
    for one in machine.judge_pairs(found({(s, 5) for s in range(16)})):
        assert one.said.endswith(": all links to rank 5")


def test_what_is_noise_makes_no_rank_slow() -> None:
    """Half of the times of one rank are long; of another one all are."""
    usual = [{"seconds": [1.0, 1.1, 1.0, 1.2] * 4} for _ in range(4)]
    noisy = {"seconds": [1.0, 5.0, 1.1, 9.0] * 4}
    assert [one.status for one in machine.judge_compute([*usual, noisy])] == [OK]
    (slow,) = machine.judge_compute([*usual, {"seconds": [3.0] * 16}])
    assert slow.status == WRONG
    assert "rank 4 takes 3 times as long" in slow.said


def steps_of(**seconds: float) -> list[Any]:
    names = {
        "ours": fast.OURS, "torchs": fast.TORCHS, "alone": fast.ALONE, "silent": fast.SILENT,
        "low": fast.LOW, "fast": fast.FASTEST, "packed": fast.PACKED,
    }  # fmt: skip
    times = {names[name]: [took, took, took * 1.01] for name, took in seconds.items()}
    looks = {fast.OURS: {"operations": 5, "collectives": 3, "launches": 9, "peak": 2 << 20}}
    one = {"device": "cuda", "ranks": 2, "seconds": times, "host": times, "looks": looks}
    return [{**one, "refused": {}}] * 2


def test_a_step_is_compared_with_torchs_own_and_with_the_plan() -> None:
    usual = {"alone": 0.5, "silent": 0.8, "low": 1.2, "fast": 0.9, "packed": 1.0}
    found = steps_of(ours=1.0, torchs=1.1, **usual)
    by_name = {one.name: one for one in fast.judge_steps(found)}
    assert {one.status for one in by_name.values()} == {OK}
    assert "fsdp2 takes 0.909 times as long" in by_name["step"].said
    assert by_name["exposed communication"].said == "200 ms, 20% of the step"
    slower = {one.name: one for one in fast.judge_steps(steps_of(ours=1.0, torchs=0.7, **usual))}
    assert slower["step"].status == WARNING
    plan = {"seconds": 0.4, "waits": 0.1, "peak": 1 << 20, "collectives": 3, "hardware": None}
    findings = Findings(values={"steps": found, "plan": [plan] * 2})
    (told,) = advice.prediction(findings)
    assert told.status == WARNING
    assert told.said.startswith("a step took 2.5 times as long as planned, and 2 times the planned")
    memory, size = advice.settings(findings)
    assert memory.change == "model.set_memory('fast')"
    assert "takes 0.9 (0.9 to 0.9)" in memory.reason
    assert (size.what, size.change) == ("zero-copy size", "")
    assert list(advice.settings(Findings())) == []


def test_advice_on_threads_has_its_figure() -> None:
    one = {"host": 0, "threads": 8, "cores": 16, "load": 0.0, "device": "cpu", "folder": "."}
    one |= {"open files": 256, "shm": None, "disk": None}
    threads, idle, files, disk = installed.judge_limits([one] * 4)
    assert (threads.status, idle.status, disk.status) == (WARNING, OK, NOT_MEASURED)
    assert files.said == "256 (ulimit -n) on ranks 0, 1, 2, 3, below 1024"
    (setting,) = advice.settings(Findings(values={"limits": [one] * 4}))
    said = "32 threads of 4 ranks run on 16 cores"
    assert setting == Setting("environment", "export OMP_NUM_THREADS=4", said)


def test_names_of_files_cannot_write_to_the_terminal() -> None:
    said = Verdict("machine", "package", WARNING, "of /tmp/\x1b[2J/fsdp2")
    assert "\x1b" not in run.line_of(said)


def test_exit_status() -> None:
    said = [Verdict("fast", "step", status, "") for status in (OK, WARNING, NOT_MEASURED)]
    assert exit_status(said) == 0
    assert exit_status([*said, Verdict("right", "fp32", WRONG, "")]) == 1


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--seconds 0", "expected 0 < seconds <= 86400, found '0'"),
        ("--timeout soon", "expected 0 < seconds <= 86400, found 'soon'"),
        ("--quick --seconds 3", "not allowed with argument"),
        ("--json no-such-folder/d.json", "the folder of no-such-folder/d.json does not exist"),
        ("model", "unrecognized arguments: model"),
    ],
)
def test_a_wrong_command_line(words: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words.split()])
    assert ended.value.code == 2
    assert found in capsys.readouterr().err


# Its file is a machine of a plan.


def test_the_file_is_a_machine_of_a_plan(tmp_path: Path) -> None:
    known = fsdp2.plan.hardware["h100-nvlink-ib"]  # type: ignore[attr-defined]  # of a function
    findings = Findings(values={"plan": [{"hardware": known.to_values()}] * 2})
    file, page = tmp_path / "doctor.json", tmp_path / "doctor.html"
    run.write(findings, 2, "cuda", page, file)
    for given in (file, str(file)):
        with torch.device("meta"):
            model = torch.nn.Linear(8, 8)
        found = fsdp2.plan(model, mesh=2, batch=torch.zeros(2, 8), hardware=given)
        assert found.hardware == known
    run.write(Findings(), 1, "cpu", None, file)
    for text, words in (
        (None, "It has no measurements of a machine"),
        ("{", "JSONDecodeError"),
        ('{"hardware": {"name": "x", "flops": {"float32": 1}}}', "from_values"),
        ('{"hardware": {"name": "x", "flops": {"float32": "fast"}}}', "from_values"),
        ('{"hardware": {"flops": {}}}', "from_values"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(fsdp2.ConfigError, match=words):
            fsdp2.plan(model, mesh=2, hardware=file)
    with pytest.raises(fsdp2.ConfigError, match="No such file"):
        fsdp2.plan(model, mesh=2, hardware="nowhere.json")
