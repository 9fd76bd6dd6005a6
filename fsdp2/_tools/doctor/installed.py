"""Check limits, and that packages, precision and environment are the same on all ranks."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch

import fsdp2
from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.doctor.ranks import Ranks, Values
from fsdp2._tools.doctor.verdicts import (
    MACHINE,
    NOT_MEASURED,
    OK,
    WARNING,
    WRONG,
    Check,
    Verdict,
    counted,
    differing,
    ranks_text,
)

OPEN_FILES, SHM_NBYTES, DISK_NBYTES = 1024, 1 << 28, 1 << 30
"""Minimum open-file limit, free bytes in /dev/shm (for NCCL), free disk bytes (for checkpoints)."""
PREFIXES = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_",
            "CUBLAS_", "NVIDIA_", "ATEN_", "DNNL_", "ONEDNN_")  # fmt: skip
OF_A_RANK = ("RANK", "TORCHELASTIC", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TORCH_NCCL")
"""Substrings of names of variables that differ between ranks by design, or that the doctor sets."""
_say = partial(Verdict, MACHINE)


def digest_of(folder: Path) -> str:
    """Return a hash of all Python files in ``folder``, a copy of the package."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _distribution() -> Values:
    """Return the version that pip installed and its location, or an empty dict if there is none."""
    try:
        found = metadata.distribution("fsdp2")
    except metadata.PackageNotFoundError:
        return {}
    direct = json.loads(found.read_text("direct_url.json") or "{}")
    root = Path(str(found.locate_file("")))
    if direct.get("dir_info", {}).get("editable"):
        root = Path(url2pathname(urlparse(direct["url"]).path))
    return {"version": found.version, "folder": str((root / "fsdp2").resolve())}


def measure_package(ranks: Ranks) -> Values:
    folder = Path(fsdp2.__file__).resolve().parent
    elsewhere = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.startswith("fsdp2.")
        and getattr(module, "__file__", None)
        and folder not in Path(str(module.__file__)).resolve().parents
    )
    others = [
        str(path)
        for path in dict.fromkeys((Path(entry) / "fsdp2").resolve() for entry in sys.path)
        if path != folder and (path / "__init__.py").is_file()
    ]
    installed = _distribution()
    if installed and installed["folder"] != str(folder):
        there = Path(installed["folder"])
        installed["digest"] = digest_of(there) if there.is_dir() else ""
    return {
        "folder": str(folder), "digest": digest_of(folder), "version": fsdp2.__version__,
        "elsewhere": elsewhere, "others": others, "installed": installed,
    }  # fmt: skip


def judge_package(found: Sequence[Values]) -> Iterator[Verdict]:
    first = found[0]
    installed = first["installed"]
    where = f"fsdp2 {first['version']} from {first['folder']}"
    groups = differing([one["digest"] for one in found])
    mixed = [rank for rank, one in enumerate(found) if one["elsewhere"]]
    if len(groups) > 1:
        for ranks in list(groups.values())[1:]:
            said = f"{ranks_text(ranks)} runs a different fsdp2: the files in"
            yield _say("package", WRONG, f"{said} {found[ranks[0]]['folder']} differ")
    elif mixed:
        modules = ", ".join(found[mixed[0]]["elsewhere"][:3])
        said = f"modules come from different folders than fsdp2 ({first['folder']}): {modules}"
        yield _say("package", WRONG, f"on {ranks_text(mixed)} {said}")
    elif installed and installed["folder"] != first["folder"]:
        same = installed["digest"] == first["digest"]
        files = "the same files" if same else "different files: check which copy you want to use"
        said = f"pip installed {installed['version']} in {installed['folder']}, with {files}"
        yield _say("package", OK if same else WARNING, f"running {where}; {said}")
    else:
        unlike = f"; another copy is in {first['others'][0]}" if first["others"] else ""
        status = OK
        said = f"running {where}{unlike}"
        if not installed:
            status = NOT_MEASURED
            said = f"running {where}, not installed by pip{unlike}"
        elif installed["version"] != first["version"]:
            status = WARNING
            said += f", but pip recorded {installed['version']}: reinstall it"
        yield _say("package", status, said)


def _nvidia_smi(query: str, device: str) -> list[str]:
    """Query ``nvidia-smi`` about a device; return an empty list if it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={device}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return [word.strip() for word in ended.stdout.split(",")] if ended.returncode == 0 else []


def measure_versions(ranks: Ranks) -> Values:
    versions: Values = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torch's commit": torch.version.git_version,
        "system": f"{platform.system()} {platform.machine()}",
    }
    device: Values = {}
    if ranks.device.type == "cuda":
        index = torch.cuda.current_device()
        versions |= {
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "device": torch.cuda.get_device_name(index),
        }
        # use the UUID: nvidia-smi's device indices ignore CUDA_VISIBLE_DEVICES
        name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        said = _nvidia_smi("driver_version,clocks.sm,clocks.max.sm,temperature.gpu", name)
        if len(said) == 4:
            versions["driver"] = said[0]
            device = dict(zip(("MHz", "most MHz", "degrees"), said[1:], strict=True))
    return {"versions": versions, "device": device}


def judge_versions(found: Sequence[Values]) -> Iterator[Verdict]:
    unlike = False
    for name in found[0]["versions"]:
        groups = differing([one["versions"].get(name) for one in found])
        if len(groups) > 1:
            unlike = True
            said = "; ".join(f"{ranks_text(ranks)} has {value}" for value, ranks in groups.items())
            yield _say("versions", WRONG, f"{name} differs: {said}")
    if not unlike:
        said = ", ".join(
            f"{name} {value}"
            for name, value in found[0]["versions"].items()
            if name != "torch's commit"
        )
        yield _say("versions", OK, f"the same on all ranks: {said}")
    clocks = [one["device"] for one in found]
    if not all(clocks):
        yield _say("device clocks", NOT_MEASURED, "nvidia-smi is missing or failed")
    else:
        said = ", ".join(f"{c['MHz']} of {c['most MHz']} MHz at {c['degrees']} C" for c in clocks)
        yield _say("device clocks", OK, said)


def measure_settings(ranks: Ranks) -> Values:
    backends: Any = torch.backends
    flags = {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(ranks.device.type),
    }
    if ranks.size > 1 and ranks.device.type == "cuda":  # the index differs by rank
        flags["default device"] = torch.get_default_device().type
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) and not any(part in name for part in OF_A_RANK)
    }
    return {"flags": flags, "environment": environment}


def judge_settings(found: Sequence[Values]) -> Iterator[Verdict]:
    yield from _judge_alike("precision", WRONG, [one["flags"] for one in found])
    yield from _judge_alike("environment", WARNING, [one["environment"] for one in found])


def _judge_alike(name: str, status: str, found: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    keys = list(dict.fromkeys(key for one in found for key in one))
    unlike = []
    for key in keys:
        groups = differing([one.get(key, "not set") for one in found])
        if len(groups) > 1:
            values = "; ".join(f"{value} on {ranks_text(r)}" for value, r in groups.items())
            unlike.append(f"{key}: {values}")
    if unlike:
        yield _say(name, status, f"ranks differ in {'. '.join(unlike[:4])}")
    else:
        shown = ", ".join(f"{key} {value}" for key, value in found[0].items()) or "nothing set"
        yield _say(name, OK, f"the same on all ranks: {shown}")


def _cores() -> float:
    """Return the number of cores that affinity and the container's quota allow this process."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    cores = cores or os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def measure_limits(ranks: Ranks) -> Values:
    folder = ranks.options.checkpoint
    shm = Path("/dev/shm")
    return {
        "host": ranks.hosts[ranks.rank],
        "threads": torch.get_num_threads(),
        "cores": _cores(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "disk": shutil.disk_usage(folder).free if folder.is_dir() else None,
        "folder": str(folder),
        "device": ranks.device.type,
    }


def judge_limits(found: Sequence[Values]) -> Iterator[Verdict]:
    hosts: dict[int, list[Values]] = {}
    for one in found:
        hosts.setdefault(one["host"], []).append(one)
    for number, ranks in hosts.items():
        where = f"host {number}: " if len(hosts) > 1 else ""
        first, threads = ranks[0], sum(one["threads"] for one in ranks)
        cores = first["cores"]
        who = f"{counted(threads, 'thread')} of {counted(len(ranks), 'rank')}"
        said = f"{where}{who} on {cores:g} cores"
        too_many = threads > max(cores, len(ranks))
        yield _say("threads", WARNING if too_many else OK, said)
        said = f"{where}load {first['load']:.3g} on {cores:g} cores when the doctor started"
        if first["load"] > cores:
            yield _say("idle", WARNING, f"{said}: other programs are running, so times are noisy")
        else:
            yield _say("idle", OK, said)
    for name, least, needs in (
        ("open files", OPEN_FILES, "ulimit -n"),
        ("shm", SHM_NBYTES, "/dev/shm, which NCCL uses within a host"),
        ("disk", DISK_NBYTES, f"the disk of {found[0]['folder']}, for checkpoints"),
    ):
        if name == "shm" and found[0]["device"] != "cuda":
            continue
        values = [one[name] for one in found]
        if None in values:
            yield _say(name, NOT_MEASURED, f"not found: {needs}")
            continue
        low = [rank for rank, value in enumerate(values) if 0 <= value < least]
        shown = nbytes_text(min(values)) if name != "open files" else str(min(values))
        word = f" on {ranks_text(low)}, below {least}" if low else ""
        yield _say(name, WARNING if low else OK, f"{shown} ({needs}){word}")


CHECKS = (
    Check(MACHINE, "package", measure_package, judge_package),
    Check(MACHINE, "versions", measure_versions, judge_versions),
    Check(MACHINE, "settings", measure_settings, judge_settings),
    Check(MACHINE, "limits", measure_limits, judge_limits),
)
