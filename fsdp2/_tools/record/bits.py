"""``fsdp2.debug.record_bits``: writes digests of a run's results, by unit, slot and step.

Defines the digest of a tensor and the file of a rank. ``bits_compared`` compares files.

[Note: additive digests]
A digest is the sum, modulo 2^64, of a hash of each element and its position in the full tensor.
For any number of ranks, digests of shards therefore add up to the full tensor's digest. Recording
needs no communication. Each replica of a parameter has a digest; these digests must be equal.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2._core.api.reproducible import Slots, slots_of
from fsdp2._core.api.settings import refuse_during_step
from fsdp2._core.base import torch_autograd, torch_compiler, torch_dtensor
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.errors import check_path
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.reduce import Reducer
from fsdp2._tools.record.rows import Writer

FORMAT = 1
OUTPUT, GRADIENT, SUMMED, UPDATE, NOTE = "output", "gradient", "summed gradient", "update", "note"
STEP_ROW = -1  # the slot number of rows about the entire step

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # signed 64-bit integers


def digest_of(tensor: Tensor, places: Tensor | None = None, key: int = 0) -> Tensor:
    """Return a plain tensor's digest, a 0-dim int64; ``places`` are the elements' positions."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
        if places is not None:
            parts = torch.arange(2, device=places.device)
            places = places.reshape(-1, 1) * 2 + parts
    values = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    if places is None:
        places = torch.arange(len(values), device=values.device)
    mixed = (values ^ (places.reshape(-1) * _ODD[0] + key)) * _ODD[1]
    mixed = (mixed ^ (mixed >> 29)) * _ODD[2]
    return (mixed ^ (mixed >> 32)).sum()


def _places_of(param: FSDPParam, rank: int, device: torch.device) -> Tensor | None:
    """Return the positions of a shard's elements in the full parameter."""
    layout = param.placement.layout
    if layout.dim is None:
        return None
    places = torch.zeros((), dtype=torch.int64, device=device)
    for dim, count in enumerate(layout.shard_shape(rank)):
        first = layout.span(rank)[0] if dim == layout.dim else 0
        stride = math.prod(layout.shape[dim + 1 :])
        places = places.unsqueeze(-1) + torch.arange(first, first + count, device=device) * stride
    return places


class BitsRecording:
    """A context manager, returned by ``fsdp2.debug.record_bits``, that writes one file per rank.

    ``path`` is this rank's file.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.path = folder / f"bits{dist.get_rank() if dist.is_initialized() else 0}.jsonl"
        self._model = model
        self._slots: Slots | None = None
        self._writer: Writer | None = None
        self._handles: list[Any] = []
        # rows are written later, to avoid waiting for the device
        self._rows: list[tuple[list[Any], Tensor]] = []
        self._counts: dict[tuple[int, int, str], int] = {}  # index of a unit's digest in a slot

    def __enter__(self) -> BitsRecording:
        slots = self._slots = slots_of("record_bits", self._model)
        refuse_during_step("record_bits", slots.units)
        self._writer = Writer(self.path)
        assert slots.clock is not None
        header = {
            "bits": FORMAT,
            "slots": slots.clock.slots,
            "seed": slots.clock.seed,
            "ranks": slots.data.size,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": _processor(slots.units),
        }
        self._writer.add(json.dumps(header) + "\n")
        slots.clock.listener = self._note_gradients
        for unit in slots.units:
            for module in unit.modules:
                self._handles.append(module.register_forward_hook(_OutputHook(self, unit)))
        self._handles += [
            register_optimizer_step_pre_hook(lambda *_: self._note_step(SUMMED)),
            register_optimizer_step_post_hook(lambda *_: self._note_step(UPDATE)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._slots is not None
        assert self._writer is not None
        for handle in self._handles:
            handle.remove()
        if self._slots.clock is not None:
            self._slots.clock.listener = None
        self._flush()
        self._writer.close()
        self._handles, self._slots = [], None

    def note(self, name: str, tensor: Tensor) -> None:
        """Record another tensor of the current slot, such as its loss, under a name."""
        self._add(NOTE, name, [digest_of(torch_dtensor.local_part(tensor))])

    def _add(
        self,
        what: str,
        unit: str,
        digests: Sequence[Tensor],
        of_step: bool = False,
    ) -> None:
        if self._slots is None or self._slots.clock is None or not digests:
            return
        clock = self._slots.clock
        slot = STEP_ROW if of_step else clock.slot
        count = 0
        if not of_step:
            key = (clock.batch, slot, f"{what} {unit}")
            count = self._counts[key] = self._counts.get(key, -1) + 1
        replica = self._slots.data.replicate.rank if of_step else 0
        row = [clock.step, slot, what, unit or "<root>", count, replica]
        self._rows.append((row, torch.stack(list(digests)).sum()))

    def _note_output(self, unit: Unit, output: Any) -> None:
        found: list[Tensor] = []
        visit_tensors(lambda tensor: found.append(torch_dtensor.local_part(tensor)), output)
        digests = [digest_of(tensor, key=place) for place, tensor in enumerate(found)]
        self._add(OUTPUT, unit.fqn, digests)

    def _note_gradients(
        self, reducer: Reducer, params: Sequence[FSDPParam], grads: Sequence[Tensor | None]
    ) -> None:
        digests = [
            digest_of(grad, key=place)
            for place, (_, grad) in enumerate(zip(params, grads, strict=True))
            if grad is not None
        ]
        self._add(GRADIENT, reducer.ids.fqn or "", digests)

    @torch_compiler.never_traced
    @torch.no_grad()
    def _note_step(self, what: str) -> None:
        if self._slots is None:
            return
        for unit in self._slots.units:
            for group in unit.own_groups:
                digests = list(_shards_of(group, what))
                self._add(what, group.fqn or "", digests, of_step=True)
        if what == UPDATE:
            self._flush()

    def _flush(self) -> None:
        assert self._writer is not None
        if self._rows:
            kept = torch.stack([digest for _, digest in self._rows]).tolist()
            for (row, _), digest in zip(self._rows, kept, strict=True):
                self._writer.add(json.dumps([*row, digest]) + "\n")
            self._writer.flush()
            self._rows.clear()
            self._counts.clear()


def _shards_of(group: ParamGroup, what: str) -> Iterator[Tensor]:
    """Yield the digests of this rank's shards of a group's parameters, or of their gradients."""
    rank = group.data.shard.rank
    for place, param in enumerate(group.params):
        if param.placement.layout.dim is None and rank > 0:
            yield torch.zeros((), dtype=torch.int64, device=group.residence.storage)
            continue
        value = param.sharded if what == UPDATE else param.sharded.grad
        if value is not None:
            local = torch_dtensor.local_part(value)
            yield digest_of(local, _places_of(param, rank, local.device), place)


class _OutputHook:
    """A forward hook. In a copy of the module, the hook is a no-op."""

    def __init__(self, recording: BitsRecording, unit: Unit) -> None:
        self._recording, self._unit = recording, unit

    @torch_compiler.never_traced
    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        if torch.is_grad_enabled() and torch_autograd.graph_task_id() == -1:
            with torch.no_grad():
                self._recording._note_output(self._unit, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Any:
    return lambda *_: None


def _processor(units: Sequence[Unit]) -> str:
    device = units[0].device
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return str(torch.get_device_module(device.type).get_device_name(device))


def record_bits(model: nn.Module, path: str) -> BitsRecording:
    """Record digests of each unit's results, so that ``same_bits`` can compare two runs.

    For each slot, two 64-bit digests are recorded per unit: of its outputs, and of its gradients.
    For each step, a digest of each unit's gradients is recorded before the optimizer's step, and a
    digest of its parameters afterwards. Each rank writes a file; nothing is communicated. Computing
    a digest takes a few kernels, so steps are slower while recording::

        with fsdp2.debug.record_bits(model, "run1") as bits:
            ...  # train
                bits.note("loss", loss)

    Args:
        model: a model that was passed to ``reproducible``.
        path: a folder without a recording.

    Raises:
        ConfigError: the folder contains a recording of this rank, or cannot be written to.
        StateError: ``reproducible`` was not called on the model; a step is running on entry.
    """
    slots_of("record_bits", model)
    return BitsRecording(model, Path(check_path("record_bits", "path", path)))
