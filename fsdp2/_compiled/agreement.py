"""Whether all ranks compiled graphs with the same collectives.

Owns the comparison. It must not know units or the compiler.

[Note: graphs that differ]
In a graph nothing can stop a rank that is about to send what others do not expect. So before a
graph runs that gathers what none of this model's graphs did yet, ranks compare what each gathers:
those that took different branches get an error. A rank that goes a new way while the others repeat
an old one is heard by nobody: it waits, and gets an error when the process group's timeout is over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from fsdp2._compiled.plan import plans
from fsdp2._core.base import torch_comm, torch_modes
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.mesh import MeshAxis

DIFFERENT = -1
"""What ranks tell each other that have seen a difference."""


class Agreement:
    """What the graphs of one compiled model gather, as ranks have agreed."""

    def __init__(self) -> None:
        self._agreed: set[int] = set()

    def reach(
        self,
        name: str,
        gathered: Sequence[tuple[str, str]],
        axes: Iterable[MeshAxis],
        device: torch.device,
    ) -> None:
        """Compare what a graph gathers (keys of plans, and names) with the other ranks' graphs.

        Collective, if it is a new one.

        Raises:
            StateError: another rank is about to gather something else. On all of these ranks.
        """
        text = "\n".join(f"{fqn} {plans[key].signature}" for key, fqn in gathered)
        number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
        if number in self._agreed:
            return
        told: int | None = number
        for axis in axes:
            if axis.size > 1:
                told = _compare(told, axis, device)
        if told is None:
            raise StateError(
                "FS801",
                f"{name or '<root>'}: ranks compiled different graphs: they would gather other "
                "parameters, or in another order. Let all ranks take the same branches and use the "
                "same units in the same order, or run the model itself, which checks every "
                "collective and says which one differs.",
            )
        self._agreed.add(number)


def _compare(number: int | None, axis: MeshAxis, device: torch.device) -> int | None:
    """Return the number if all ranks of an axis have it, else None: what the next axis is told.

    So an error that two ranks of one axis find is raised on those of the others, too.
    """
    with torch_modes.hidden_from_modes(), torch.no_grad():
        own = torch.tensor(
            [DIFFERENT if number is None else number], dtype=torch.int64, device=device
        )
        seen = torch.empty(axis.size, dtype=torch.int64, device=device)
        torch_comm.all_gather_single(seen, own, axis.pg, False)
        return number if set(seen.tolist()) == {number} else None
