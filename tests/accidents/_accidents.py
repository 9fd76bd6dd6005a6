"""What may happen to a run, and when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.accidents._job import SAVE_EVERY, STEPS, Job
from tests.accidents._program import FILL_MEMORY, RAISE

Strike = Callable[[Job, random.Random], None]


def _to_a_worker(number: signal.Signals) -> Strike:
    def strike(job: Job, rng: random.Random) -> None:
        _send(rng.choice(job.workers() or [0]), number)

    return strike


def _to_a_machine(job: Job, rng: random.Random) -> None:
    """End the agent that does not hold the rendezvous, and its workers, at once."""
    workers = job.workers(1)
    job.agents[1].kill()
    for pid in workers:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


MACHINE = "a machine is gone"
KINDS: dict[str, Strike] = {
    "SIGKILL of a worker": _to_a_worker(signal.SIGKILL),
    "SIGTERM of a worker": _to_a_worker(signal.SIGTERM),
    "an exception in a worker": _to_a_worker(RAISE),
    "out of memory in a worker": _to_a_worker(FILL_MEMORY),
    "SIGSTOP of a worker": _to_a_worker(signal.SIGSTOP),
    MACHINE: _to_a_machine,
}


@dataclass(frozen=True)
class Accident:
    """One accident, and when it happens.

    Attributes:
        step: it happens so many seconds after this step was made; None: after the accident before,
            or after workers were started.
    """

    kind: str
    step: int | None
    seconds: float

    @property
    def moment(self) -> str:
        if self.step is None:
            return f"{self.seconds:.1f} s into a start"
        return f"{self.seconds * 1000:.0f} ms after step {self.step}"


@dataclass(frozen=True)
class Trial:
    seed: int
    nproc: int
    accidents: tuple[Accident, ...]

    @staticmethod
    def drawn(seed: int) -> Trial:
        """Draw one or two accidents. The kind of the first one goes round with the seed."""
        rng = random.Random(seed)
        kinds = [[*KINDS][seed % len(KINDS)]]
        if rng.random() < 0.4:
            kinds.append(rng.choice([kind for kind in KINDS if kind not in (*kinds, MACHINE)]))
        found: list[Accident] = []
        first = 1
        for kind in kinds:
            if rng.random() < 0.2:
                found.append(Accident(kind, None, rng.uniform(0, 6)))
            else:
                step = rng.randint(first, STEPS - 2 * SAVE_EVERY)
                found.append(Accident(kind, step, rng.uniform(0, 0.15)))
                first = step
        return Trial(seed, rng.choice((1, 2)), tuple(found))
