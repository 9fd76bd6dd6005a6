"""Collectives of a step: what each event of the engine stands for, and who takes part in it.

Owns the numbers of ranks and bytes as real ranks have them. It must not know how a step is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsdp2._base import events
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.registration import SMALLER
from fsdp2._plan.values import Collective, GroupPlan


@dataclass(frozen=True)
class Over:
    """How many ranks take part in the collective of an event, and in one that follows at once."""

    ranks: int = 0
    then: int = 0
    is_smaller: bool = False

    @staticmethod
    def of(group: ParamGroup, kind: str) -> Over:
        if kind != "unshard":
            then = group.data.summed.size if group.settings.all_reduce_grads else 0
            return Over(group.data.scattered.size, then)
        smaller = group.buffers.post_forward.mesh
        if smaller is None or group.state is not SMALLER:
            return Over(group.data.shard.size)
        return Over(smaller.shard.size, is_smaller=True)


def with_stamps(event: events.Event, over: Over, sizes: Mapping[str, GroupPlan]) -> events.Event:
    """Return an event with the bytes that real ranks have: they send numbers along."""
    group = sizes.get(event.fqn)
    if group is None or not event.nbytes:
        return event
    nbytes = {
        "unshard": group.regather_nbytes if over.is_smaller else group.gather_nbytes,
        "reduce": group.reduce_nbytes,
        "reshard": group.whole_nbytes,
    }
    return replace(event, nbytes=nbytes.get(event.kind, event.nbytes))


def collectives_of(
    seen: Iterable[tuple[events.Event, Over]], sizes: Mapping[str, GroupPlan]
) -> Iterator[Collective]:
    for event, over in seen:
        phase, fqn = event.phase, event.fqn
        if event.kind == "unshard":
            yield Collective(phase, "all_gather", fqn, event.nbytes, over.ranks)
        elif event.kind == "reduce":
            yield Collective(phase, "reduce_scatter", fqn, event.nbytes, over.ranks)
            group = sizes[fqn]
            if over.then > 1 and group.all_reduce_nbytes > 0:
                nbytes, then = group.all_reduce_nbytes, over.then
                yield Collective(phase, "all_reduce", fqn, nbytes, then, over.ranks)
            elif over.then > 1:
                nbytes, then = group.outer_nbytes, over.then
                yield Collective(phase, "reduce_scatter", fqn, nbytes, then, over.ranks)
