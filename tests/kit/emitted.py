"""What inductor emits for a compiled step, and how good it is: overlap, copies, memory.

    step = emitted_step(world_size=4, bf16=True)
    print(step.describe())
    step.overlapped_share, step.exceptions, step.copied_nbytes, step.peak_nbytes

One process plays rank 0 of ``world_size`` over collectives that do nothing, and trains a small
stack of blocks, with an embedding and a head in the root, through ``fsdp2.compile``. The code of
both graphs is caught on its way to be loaded; C++ kernels are not compiled but stubbed (their
outputs are filled with ones), so a step takes seconds and needs no compiler. They are emitted
without vectors, whatever the machine has, so figures are the same everywhere. ``emitted_walk``
says what the events are and how bytes are counted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import torch

from benchmarks.kit import noop
from benchmarks.kit.models import Size, build, make_input, make_step
from tests.kit.emitted_module import Module
from tests.kit.emitted_walk import Buffer, Event, Walk

SMALL = Size(depth=4, width=64, hidden=128, vocabulary=256, tokens=8)
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Collective:
    """A collective of a step: where it was issued, and what it had beside it until it was awaited.

    ``products`` counts products of matrices between issue and wait; ``awaited`` is False if nobody
    waits in the graph that issued it.
    """

    graph: str
    event: Event
    products: int
    flops: int
    awaited: bool

    def __str__(self) -> str:
        beside = f"{self.products} products ({self.flops} flop) beside it"
        return f"{self.graph}: {self.event}, {beside}{'' if self.awaited else ', never awaited'}"


@dataclass(frozen=True)
class Step:
    """The events of one training step: a forward graph and a backward graph."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    model_nbytes: int = 0

    @property
    def graphs(self) -> dict[str, tuple[Event, ...]]:
        return {FORWARD: self.forward, BACKWARD: self.backward}

    @cached_property
    def collectives(self) -> list[Collective]:
        return [one for name, events in self.graphs.items() for one in _collectives(name, events)]

    @property
    def overlapped_share(self) -> float:
        """Of the collectives, the share that has a product of matrices between issue and wait."""
        overlapped = sum(one.products > 0 for one in self.collectives)
        return overlapped / len(self.collectives) if self.collectives else 1.0

    @property
    def exceptions(self) -> list[Collective]:
        """Collectives that nothing hides."""
        return [one for one in self.collectives if one.products == 0]

    def nbytes(self, kind: str, graph: str | None = None) -> int:
        """Add up the bytes of one kind of events, of one graph or of both."""
        events = self.graphs[graph] if graph else (*self.forward, *self.backward)
        return sum(event.nbytes for event in events if event.kind == kind)

    @property
    def copied_nbytes(self) -> int:
        return self.nbytes("copy")

    @property
    def cast_nbytes(self) -> int:
        return self.nbytes("cast")

    def passes(self, kind: str, graph: str | None = None) -> float:
        """Return bytes written over the model's bytes, in the dtype that it computes in."""
        return self.nbytes(kind, graph) / self.model_nbytes

    @property
    def unknown(self) -> list[str]:
        """Calls that somebody has to look at: they may hide copies, or compute."""
        events = (*self.forward, *self.backward)
        return sorted({event.name for event in events if event.kind == "unknown"})

    @property
    def peak_nbytes(self) -> int:
        """The most bytes at a time, above the step's start; no parameters, no batch."""
        return max(_running(self.forward), _running((*self.forward, *self.backward)))

    @property
    def kept_nbytes(self) -> int:
        """What forward leaves: its output, and what it saved for backward."""
        return sum(_change(event) for event in self.forward)

    def describe(self, *, memory: bool = True) -> str:
        """Return one line for each event."""
        lines = []
        for name, events in self.graphs.items():
            lines.append(f"-- {name}")
            shown = (e for e in events if memory or e.kind not in ("alloc", "free"))
            lines += [str(event) for event in shown]
        return "\n".join(lines)


def _change(event: Event) -> int:
    return {"alloc": event.nbytes, "free": -event.nbytes}.get(event.kind, 0)


def _running(events: Sequence[Event]) -> int:
    live = highest = 0
    for event in events:
        live += _change(event)
        highest = max(highest, live)
    return highest


def _collectives(graph: str, events: Sequence[Event]) -> Iterator[Collective]:
    for start, event in enumerate(events):
        if event.kind != "issue":
            continue
        waits = (
            index
            for index, other in enumerate(events)
            if index > start and other.kind == "wait" and set(event.ids) & set(other.ids)
        )
        end = next(waits, None)
        beside = [other for other in events[start:end] if other.is_product]
        flops = sum(other.flops for other in beside)
        yield Collective(graph, event, len(beside), flops, end is not None)


def read_step(codes: Sequence[str], *, model_nbytes: int = 0) -> Step:
    """Walk through a forward and a backward module, in that order, or a forward one alone.

    What forward returns behind its outputs is what backward gets before its tangents, in that
    order, so memory is followed from one to the other.
    """
    forward, *rest = (Module(code) for code in codes)
    assert len(rest) <= 1, f"expected a forward and a backward graph, found {len(codes)} graphs"
    walk = Walk()
    tensors = forward.argument_tensors()
    inputs = [  # None: a mesh, say
        walk.allocate(tensors[name], is_counted=False) if name in tensors else None
        for name in forward.arguments
    ]
    outputs = walk.run(forward, list(inputs))
    end = len(walk.events)
    for backward in rest:
        saved = _arguments_of_backward(walk, backward, outputs)
        outputs = []
        outputs = walk.run(backward, saved)
    events = tuple(walk.events)
    return Step(events[:end], events[end:], model_nbytes)


def _arguments_of_backward(walk: Walk, backward: Module, outputs: list[Any]) -> list[Any]:
    names, tensors = backward.arguments, backward.argument_tensors()
    tangents = [name for name in names if name.startswith("tangents")]
    kept = outputs[len(outputs) - (len(names) - len(tangents)) :]
    assert names[len(kept) :] == tangents, f"tangents are not the last of {names}"
    for name, buffer in zip(names, kept, strict=False):
        found = buffer.tensor.shape if isinstance(buffer, Buffer) else None
        expected = tensors[name].shape if name in tensors else None
        assert found == expected, f"{name}: expected {expected}, found {found}"
    return [*kept, *(walk.allocate(tensors[name]) for name in tangents)]


def emitted_step(
    world_size: int,
    *,
    bf16: bool = False,
    memory: str | int | None = None,
    size: Size = SMALL,
    prepare: Callable[[Any], None] = lambda model: None,
    **compile_kwargs: Any,
) -> Step:
    """Compile and run a training step of a sharded stack; return what was emitted.

    The stack is small and stands for a large one: its embedding and its head are parts of the root.

    Args:
        memory: what the model is told with ``set_memory``.
        prepare: gets the sharded model before it is compiled.
        compile_kwargs: go to ``fsdp2.compile``.
    """
    import fsdp2

    with noop.ranks(world_size) as (_, mesh):
        with mock.patch("fsdp2._core.api.collect.PART_NBYTES", 64):
            model: Any = build("fsdp2", size, mesh, bf16=bf16, embedding=True)
        if memory is not None:
            model.set_memory(memory)
        prepare(model)
        compiled = fsdp2.compile(model, **{"fullgraph": True, **compile_kwargs})
        x = make_input("fsdp2", size, bf16=bf16, embedding=True)
        codes = emitted_by(make_step(compiled, x))
    return read_step(codes, model_nbytes=size.numel * (2 if bf16 else 4))


def emitted_by(step: Callable[[], None]) -> list[str]:
    """Run a step that compiles with inductor; return the code of each graph, kernels stubbed."""
    from torch._inductor.utils import run_and_get_code

    with stubbed_kernels():
        _, codes = run_and_get_code(step)
    torch._dynamo.reset()  # nobody else shall run kernels that compute nothing
    return codes


def known_bandwidth() -> contextlib.AbstractContextManager[Any]:
    """Spare inductor's scheduler a question to Triton, which no CPU has (torch before 2.15)."""
    name = "torch.utils._runtime_estimation.get_gpu_dram_gbps"
    return mock.patch(name, return_value=1000, create=True)


@contextlib.contextmanager
def stubbed_kernels() -> Iterator[None]:
    """Let inductor emit code and load it without compiling kernels; no caches are read or written.

    What is compiled inside keeps its stubs: call ``torch._dynamo.reset()`` when done with it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, cpp_builder, cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile

    options = {
        "force_disable_caches": True,
        "compile_threads": 1,  # no processes
        "benchmark_harness": True,  # it tells the arguments' sizes
    }

    compiler = {  # nobody asks whether there is one, and of which kind
        "get_cpp_compiler": lambda: "g++",
        "is_gcc": lambda: True,
        "is_clang": lambda: False,
        "is_msvc_cl": lambda: False,
    }

    def stub(_self: object, argtypes: Sequence[str], _source: str) -> Callable[..., None]:
        outputs = [not kind.startswith("const") and "*" in kind for kind in argtypes]

        def kernel(*args: Any) -> None:
            for argument, is_output in zip(args, outputs, strict=True):
                if is_output:
                    argument.fill_(1)

        return kernel

    with (
        config.patch(options),
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(AsyncCompile, "cpp_pybinding", stub),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list),  # it compiles programs to see
        mock.patch.multiple(cpp_builder, **compiler),
        known_bandwidth(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*force_disable_caches")
        yield
