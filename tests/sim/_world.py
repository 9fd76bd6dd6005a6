"""What a scenario is: one program, run on the host and on the simulated device, and compared.

A scenario is a function of a `World` that returns tensors. It makes its batches before its loop: a
blocking copy to the device would order everything behind it, and hide what nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit import meshes, sim
from tests.kit.models import seeded
from tests.kit.parity import whole
from tests.sim._streams import NoEvent, NoStream, OwnEvent, OwnStream

TOLERANCE = 1e-6  # of fp32, relative to the largest value; other dtypes have their own eps
UNSTEADY = 3
"""Steps in which a program is learnt: what comes next, and how ranks take turns."""
Values = Mapping[str, Tensor]
Program = Callable[["World"], Values]


@dataclass
class World:
    """Where a program runs: ``kind`` is ``cpu`` or ``sim``; a program need not know which."""

    kind: str
    rank: int
    size: int
    waits: list[sim.Found] = field(default_factory=list)  # of the host, in steady steps
    kept: list[nn.Module] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, 0) if self.kind != "cpu" else torch.device("cpu")

    @property
    def is_simulated(self) -> bool:
        return self.kind != "cpu"

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return a mesh: one number shards, two replicate and shard; none: all ranks shard."""
        if len(shape) == 2 and names is None:
            names = ("replicate", "shard")
        return meshes.shared_mesh(shape or (self.size,), names)

    def stream(self, own: bool = False) -> Any:
        """Return a new stream; with ``own`` of the device's own class, as ``torch.cuda.Stream``."""
        if not self.is_simulated:
            return NoStream()
        return (OwnStream if own else torch.Stream)(device=self.device)

    def event(self, own: bool = False) -> Any:
        """Return a new event; with ``own`` of the device's own class, as ``torch.cuda.Event``."""
        if not self.is_simulated:
            return NoEvent()
        return OwnEvent() if own else torch.Event(self.device)

    @property
    def current_stream(self) -> Any:
        return torch.accelerator.current_stream() if self.is_simulated else NoStream()

    @contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Order what is inside, in another stream, after what is before and before what follows."""
        stream.wait_stream(self.current_stream)
        with stream:
            yield
        self.current_stream.wait_stream(stream)

    def build(self, make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
        """Return a model of the same values on every rank and in both worlds."""
        return seeded(make, seed)  # on the device, whose numbers are the host's

    def tensor(self, *shape: int, seed: int = 0, by_rank: bool = True) -> Tensor:
        """Return numbers that are the same in both worlds, others on each rank."""
        generator = torch.Generator("cpu").manual_seed(100 * seed + (self.rank if by_rank else 0))
        return torch.randn(*shape, generator=generator, device="cpu").to(self.device)

    def shard(self, model: nn.Module, units: Any = (), **kwargs: Any) -> nn.Module:
        """Shard units and the root over ``mesh``, or one of that shape; reports name its lanes."""
        mesh = kwargs.setdefault("mesh", ())
        if isinstance(mesh, tuple):
            kwargs["mesh"] = self.mesh(*mesh)
        for unit in units:
            fsdp2.fully_shard(unit, **kwargs)
        fsdp2.fully_shard(model, **kwargs)
        self.kept.append(model)
        return model

    @contextmanager
    def steady(self) -> Iterator[None]:
        """What is inside may not let the host wait for the device."""
        if not self.is_simulated:
            yield
            return
        before = {(found.kind, found.text): found.times for found in sim.waits()}
        yield
        for found in sim.waits():
            times = found.times - before.get((found.kind, found.text), 0)
            if times:
                self.waits.append(sim.Found(found.kind, found.text, times))

    def steps(self, count: int, unsteady: int = UNSTEADY) -> Iterator[int]:
        """Count steps; those behind the first few are steady: the host may not wait in them."""
        for step in range(count):
            if step < unsteady:
                yield step
            else:
                with self.steady():
                    yield step
            self.name_lanes()

    def name_lanes(self) -> None:
        if not self.is_simulated:
            return
        for model in self.kept:
            unit = unit_of(model)
            if unit is not None and unit.runtime is not None:
                sim.name_lanes(unit.runtime.context.streams)

    @property
    def is_unchecked(self) -> bool:
        """Return True if a stamp was unreadable, so that ranks are not compared any more."""
        units = [unit_of(module) for model in self.kept for module in model.modules()]
        groups = [group for unit in units if unit is not None for group in unit.own_groups]
        return any(one.is_silent for group in groups for one in group.ids.agreements)

    def values(self, *models: nn.Module, **more: Tensor) -> dict[str, Tensor]:
        """Return all parameters, whole and on the host, and what else is given."""
        found = dict(more)
        for index, model in enumerate(models):
            for name, param in model.named_parameters():
                found[f"{index}.{name}"] = whole(param)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


@dataclass(frozen=True)
class Scenario:
    """A program with a name, and on how many ranks it runs."""

    name: str
    program: Program
    ranks: int
    slow: bool  # CI runs it, the default suite does not
    may_wait: str  # why the host waits in its steady steps; empty: it may not
    tolerance: float


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    ranks: int = 2, *, slow: bool = False, may_wait: str = "", tolerance: float = TOLERANCE
) -> Callable[[Program], Program]:
    """Put a program into the list."""

    def add(program: Program) -> Program:
        name = program.__name__
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, program, ranks, slow, may_wait, tolerance)
        return program

    return add


@dataclass(frozen=True)
class Report:
    """What one rank found in a scenario."""

    scenario: str
    reports: list[sim.Found]
    waits: list[sim.Found]
    difference: float  # the largest between both worlds, relative to the tensor's largest value
    differing: str  # the tensor that has it
    operations: int
    accesses: int
    peak_nbytes: int


def run_scenario(name: str) -> Report:
    """Run a scenario in both worlds on this rank."""
    scenario = SCENARIOS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    results, unchecked = {}, {}
    for kind in ("cpu", "sim"):
        meshes.use_device(kind)
        torch.set_default_device(kind)
        torch.manual_seed(7)
        world = World(kind, rank, size)
        if kind == "sim":
            sim.finish()
            sim.load().forget()
        results[kind] = scenario.program(world)
        unchecked[kind] = world.is_unchecked
    sim.finish()
    assert unchecked["sim"] <= unchecked["cpu"], "the comparison of ranks was switched off"
    difference, differing = 0.0, ""
    assert results["cpu"].keys() == results["sim"].keys()
    for key, expected in results["cpu"].items():
        found = results["sim"][key]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), key
        if expected.numel() == 0:
            continue
        left, right = found.double(), expected.double()
        assert not right.isnan().any(), key
        scale = max(float(right.abs().max()), 1e-30)
        here = float((left - right).abs().max()) / scale
        if difference == difference and not here <= difference:  # a NaN stays
            difference, differing = here, key
    operations, accesses, _, peak = sim.load().counts()
    report = Report(
        name, sim.reports(), world.waits, difference, differing, operations, accesses, peak
    )
    sim.load().forget()
    return report


def problems(report: Report) -> str:
    """Return what is wrong with a scenario in words, or nothing."""
    scenario = SCENARIOS[report.scenario]
    told = [str(found) for found in report.reports]
    if not scenario.may_wait:
        told += [f"the host waits in a steady step: {found}" for found in report.waits]
    if not report.difference <= scenario.tolerance:
        told.append(
            f"{report.differing} differs from the host's by {report.difference:.1e} of its largest "
            f"value, more than {scenario.tolerance:.0e}"
        )
    return "\n\n".join(told)
