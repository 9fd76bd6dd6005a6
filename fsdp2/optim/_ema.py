"""``EMA``: an exponential moving average of parameters, shard by shard, between steps only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.api.settings import refuse_during_step, units_in
from fsdp2._core.base import torch_dealt, torch_tensors
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    carrying,
    check_dtype,
    check_flag,
    check_module,
    check_number,
    wrong_value,
)
from fsdp2._core.base.fitting import require_representable
from fsdp2._core.base.names import cleaned, named_parameters
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.base.torch_dtensor import local_part, placed_like
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.engine.between_steps import reshard_if_idle
from fsdp2._core.transfer.redistribute import Grids

Decay = float | Callable[[int], float]


class EMA:
    """Keep an exponential moving average of a model's parameters.

    ``average = decay * average + (1 - decay) * parameter`` at each ``update()``. Every rank
    averages its own shards, in a few kernels for the whole model and without communication. The
    averages start as copies of the parameters, with the same placements.

    Args:
        model: a materialised model. It may be fully or partly sharded, or not sharded at all.
        decay: a number from 0 to 1, or a function of the number of earlier updates (0 at first).
        dtype: dtype of the averages of floating-point values; by default, the dtype of each value.
            For bf16 parameters, use ``torch.float32``: bf16 averages lose small updates.
        include_buffers: average floating-point buffers, and copy other buffers.

    Integers, booleans and 8-bit floats are copied, not averaged.

    Raises:
        ConfigError: ``decay`` is not a number from 0 to 1; a parameter is on the meta device.

    Source: Polyak and Juditsky, 1992; ``torch.optim.swa_utils`` for unsharded parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: Decay = 0.999,
        *,
        dtype: torch.dtype | None = None,
        include_buffers: bool = False,
    ) -> None:
        check_module("EMA", "model", model)
        if not callable(decay):
            _check_decay(decay)
        check_dtype("EMA", "dtype", dtype)
        check_flag("EMA", "include_buffers", include_buffers)
        self.model = model
        self.decay = decay
        self.updates = 0
        self._dtype = dtype
        self._include_buffers = include_buffers
        self._is_swapped = False
        self._averages: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, value in self._values().items():
                if value.is_meta:
                    raise ConfigError(
                        "FS208", f"EMA: {name} is on the meta device. Materialize the model first."
                    )
                self._averages[name] = self._like(value)

    def _values(self) -> dict[str, Tensor]:
        """Return the tensors to average, as registered between steps. StateError in a step."""
        units = units_in(self.model, recurse=True)
        for unit in units:
            reshard_if_idle(unit)
        refuse_during_step("EMA", units)
        values: dict[str, Tensor] = {**named_parameters(self.model)}
        if self._include_buffers:
            values.update(cleaned(dict(self.model.named_buffers())))
        return values

    def _like(self, value: Tensor) -> Tensor:
        dtype = value.dtype
        if self._dtype is not None and _is_averaged(value):
            dtype = self._dtype
        return placed_like(value, local_part(value).detach().to(dtype, copy=True))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages from the parameters. Call it after the optimizer's step.

        Raises:
            StateError: called inside ``swapped()`` or during a step; since the average was created,
                a parameter was added or removed, or its placement was changed.
        """
        if self._is_swapped:
            raise StateError(
                "FS706",
                "EMA.update was called inside swapped(), where the parameters are the averages. "
                "Exit the context first.",
            )
        wait_for_copies()
        decay = _check_decay(self.decay(self.updates) if callable(self.decay) else self.decay)
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for average, value in self._pairs():
            if _is_averaged(value):
                averages.append(average)
                values.append(value.to(average.dtype))
            else:
                average.copy_(value)
        ends = torch_tensors.by_kind(values)
        for kind, alike in torch_tensors.by_kind(averages).items():
            torch_tensors.lerp_all_(alike, ends[kind], 1.0 - decay)
        self.updates += 1

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        values = self._values()
        self._check_names("parameters of the model", values)
        pairs = []
        for name, average in self._averages.items():
            value = values[name]
            own, local = local_part(average), local_part(value)
            if own.shape != local.shape or own.device != local.device:
                raise StateError(
                    "FS707",
                    f"EMA: {name} is now {_describe(value)}, but its average is "
                    f"{_describe(average)}. Create a new EMA and load the old one's state_dict.",
                )
            pairs.append((own, local))
        return pairs

    def _check_names(self, what: str, found: Mapping[str, Any]) -> None:
        missing = [name for name in self._averages if name not in found]
        more = [name for name in found if name not in self._averages]
        if missing or more:
            raise StateError(
                "FS707",
                f"EMA: {what} differ from the averages: missing {missing}, unexpected {more}. "
                "Create the EMA from the model that was averaged.",
            )

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters' values with the averages inside the context, to evaluate or save.

        Meanwhile, each rank keeps a copy of its shards. On exit, the values are restored, so writes
        made in the context are lost.

        Raises:
            StateError: as ``update``.
        """
        if self._is_swapped:
            raise StateError("FS706", "EMA.swapped was entered twice. Exit the context first.")
        with torch.no_grad():
            pairs = self._pairs()
            kept = [value.clone() for _, value in pairs]
        self._is_swapped = True
        try:
            with torch.no_grad():
                for average, value in pairs:
                    value.copy_(average)
            yield
        finally:
            self._is_swapped = False
            with torch.no_grad():
                for (_, value), old in zip(self._pairs(), kept, strict=True):
                    value.copy_(old)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"updates": int, "averages": {name: tensor}}``; sharded values are DTensors.

        ``torch.distributed.checkpoint`` saves it like a model's state. Tensors are not copied.
        """
        return {"updates": self.updates, "averages": dict(self._averages)}

    @torch.no_grad()
    @operation("EMA.load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` saved on any mesh, or one with full tensors.

        Collective if an average is sharded. On an error, no rank changes anything.

        Raises:
            StateError: unexpected or missing names.
            ConfigError: the state dict is invalid; a value has another shape than its average, or
                cannot be represented in the average's dtype. Nothing was changed.
        """
        is_sharded = any(isinstance(average, DTensor) for average in self._averages.values())
        main = Grids([*self._averages.values()]).main if is_sharded else Grid(())
        with main.together("EMA.load_state_dict"):
            values = self._checked(state_dict)
        with carrying():
            pairs = [
                (local_part(average), local_part(_placed_alike(values[name], average)))
                for name, average in self._averages.items()
            ]
        for average, value in pairs:
            average.copy_(value)
        self.updates = state_dict["updates"]

    def _checked(self, state: Any) -> dict[str, Tensor]:
        what = "EMA.load_state_dict"
        given = state if isinstance(state, Mapping) else {}
        averages, updates = given.get("averages"), given.get("updates")
        if not isinstance(averages, Mapping) or type(updates) is not int or updates < 0:
            raise ConfigError(
                "FS708",
                f"{what}: expected the dict that state_dict() returns, {{'updates': a number, "
                f"'averages': tensors by name}}, found updates={updates!r} and averages of type "
                f"{type(averages).__name__}. Nothing was changed.",
            )
        values: dict[str, Tensor] = cleaned(averages)
        self._check_names("names in the state dict", values)
        for name, average in self._averages.items():
            value: Any = values[name]
            if not isinstance(value, Tensor) or value.shape != average.shape:
                found = (
                    f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else "is invalid"
                )
                raise ConfigError(
                    "FS708",
                    f"{what}: {name} {found}, expected a tensor of shape {tuple(average.shape)}. "
                    "Nothing was changed.",
                )
            require_representable(what, name, local_part(value), average.dtype)
        return values


EMA.__module__ = "fsdp2._pickles"  # pickles stay valid if this file moves


def _placed_alike(value: Tensor, average: Tensor) -> Tensor:
    if not isinstance(average, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    mesh, placements = average.device_mesh, average.placements
    if isinstance(value, DTensor):
        if value.device_mesh == mesh:
            return torch_dealt.redistribute(value, mesh, placements)
        value = value.full_tensor()
    return torch_dealt.distribute(value, mesh, placements)


def _is_averaged(value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and value.dtype.itemsize > 1


def _describe(value: Tensor) -> str:
    local = local_part(value)
    return f"a {type(value).__name__} of local shape {tuple(local.shape)} on {local.device}"


def _check_decay(decay: object) -> float:
    number = check_number("EMA", "decay", decay, "a number from 0 to 1", 0.0)
    if number > 1:
        raise wrong_value("EMA", "decay", "a number from 0 to 1", decay)
    return number
