"""Two hosts on one machine: network namespaces joined by a link that can be cut.

Owns the namespaces, their link, and the launcher (torchrun) in each. Needs root, and a kernel that
allows namespaces; `missing()` says what is not there. Both hosts have the files of the machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit.pool import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PORT = 29400
NOWHERE = "02:00:00:00:00:99"
"""An address that no interface has: what is sent there is lost without an answer."""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@functools.cache
def missing() -> str:
    """Return why there can be no namespaces here; "" if there can."""
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian: iproute2)"
    try:
        with link():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


class Host:
    """A namespace, its end of the link, and the agent that runs in it."""

    def __init__(self, name: str, number: int, other: int) -> None:
        self.name = name
        self.label = "AB"[number - 1]
        self.address, self.other = f"10.77.0.{number}", f"10.77.0.{other}"
        self.interface = f"link{number}"
        self.agent: subprocess.Popen[str] | None = None

    def start(self, output: Path, *program: str) -> None:
        """Start an elastic agent of two workers, of a job of one or two hosts."""
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
            "FSDP2_TEST_HOST": self.label,
            # Else workers that are restarted meet in the agents' store, where they may find
            # addresses of workers that have ended, and fail with "connection refused".
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = ["ip", "netns", "exec", self.name, sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
        command += [f"--rdzv-endpoint=10.77.0.1:{PORT}", f"--local-addr={self.address}"]
        keeps_store = int(self.label == "A")  # a name would have to be that of the machine
        conf = f"is_host={keeps_store},join_timeout=120,last_call_timeout=60"
        command += [f"--rdzv-conf={conf}", "--monitor-interval=0.1"]
        with output.open("a") as log:
            self.agent = subprocess.Popen(
                [*command, *program], cwd=ROOT, env=environment, stdout=log, stderr=log, text=True
            )

    def has_ended(self) -> bool:
        return self.agent is not None and self.agent.poll() is not None

    def returncode(self) -> int | None:
        return None if self.agent is None else self.agent.returncode

    def end(self) -> None:
        """End what runs in the namespace: the agent and its workers."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        for number in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), 9)
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()


class Link:
    """Two hosts, and what is between them."""

    def __init__(self, first: Host, second: Host) -> None:
        self.hosts = (first, second)

    def take_down(self) -> None:
        """Take one end down: the hosts see that there is no carrier."""
        _ip("-n", self.hosts[1].name, "link", "set", self.hosts[1].interface, "down")

    def lose_all(self) -> None:
        """Let all that is sent be lost: nobody sees anything, and nothing is answered."""
        for host in self.hosts:
            self._send_to(host, NOWHERE)

    def mend(self) -> None:
        """Be whole again, whatever was done."""
        _ip("-n", self.hosts[1].name, "link", "set", self.hosts[1].interface, "up")
        for host in self.hosts:
            with contextlib.suppress(OSError):  # there is no entry where nothing was lost
                _ip("-n", host.name, "neigh", "del", host.other, "dev", host.interface)

    def _send_to(self, host: Host, address: str) -> None:
        words = ("lladdr", address, "nud", "permanent", "dev", host.interface)
        _ip("-n", host.name, "neigh", "replace", host.other, *words)


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Make two hosts with a link, and take them away again with all that runs in them."""
    names = [f"fsdp2-{os.getpid()}-{label}" for label in "ab"]
    hosts = [Host(names[0], 1, 2), Host(names[1], 2, 1)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        ends = ("type", "veth", "peer", "name", hosts[1].interface, "netns", hosts[1].name)
        _ip("-n", hosts[0].name, "link", "add", hosts[0].interface, *ends)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
        yield Link(*hosts)
    finally:
        for host in hosts:
            host.end()
            with contextlib.suppress(OSError):
                _ip("netns", "del", host.name)


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(is_there: Callable[[], bool], what: str, limit_s: float) -> None:
    """Wait until something is so. Raises: TimeoutError, which says what never was."""
    end = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {limit_s:g} s: {what}")
        time.sleep(0.05)
