"""Communication hooks: user functions that sum gradients instead of the backend.

Contains ``register_comm_hook`` and the hook ``Compress``. Hooks receive flat buffers.

[Note: hooks sum]
A hook computes the *sum* over ranks. The engine divides the sum as usual, by the number of ranks or
the factor of ``set_gradient_divide_factor`` (in two steps for fp16 reductions). After the
gradients, a buffer contains counts and, on a CPU, stamps for checking that ranks run the same
operations. A hook preserves counts and stamps if it sums all elements in the same way, in any
floating-point dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from fsdp2._core.api.settings import refuse_dealt, refuse_during_step, refuse_layers, sharded_units
from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import (
    ConfigError,
    check_count,
    check_flag,
    check_function,
    wrong_type,
    wrong_value,
)
from fsdp2._core.comm.coded_sum import CODES, CodedSum, Exact
from fsdp2._core.comm.comms import ReduceScatter
from fsdp2._core.comm.wire import DefaultReduceScatter, TorchMemory
from fsdp2._core.params.planning import GradientScale

Hook = Callable[[Any, Tensor, Tensor, dist.ProcessGroup], None]


class Compress:
    """A communication hook that sends gradients in a narrower dtype. See ``register_comm_hook``.

    With a 16-bit dtype, gradients are cast and the backend sums in that dtype. With an 8-bit dtype,
    each rank sends codes, and a scale for each block of codes, to the owner of each shard. The
    owner decodes the codes, and sums the values in the reduce dtype. Over a replicate axis, the
    sums are also sent back as codes, identical for all ranks. The engine's counts, and gradients of
    replicated parameters, are not rounded, because replicas must stay equal.

    Args:
        dtype: ``torch.bfloat16``, ``torch.float16``, ``torch.int8``, ``torch.float8_e4m3fn`` or
            ``torch.float8_e5m2``. For fp16, gradients are scaled down before sending, so that sums
            do not overflow, and scaled up afterwards.
        error_feedback: add the rounding error of the previous cast to the unit's next gradients.
            On every rank, the errors take as much memory as the unit's full gradients, in the
            reduce dtype (for 8-bit dtypes, at least fp32). Recommended for 8-bit dtypes.
        block: for 8-bit dtypes, the number of elements that share a 2-byte scale.
        only_replicas: for 8-bit dtypes, sum over a shard axis in the reduce dtype and use codes
            only over a replicate axis, which usually spans slower links.

    Raises:
        ConfigError: ``dtype`` is not listed above; a flag is not a bool; or ``block`` is below 8.

    Source: the compression hooks of ``torch.distributed.algorithms``; error feedback: Seide et al.,
    2014, and Karimireddy et al., 2019; codes sent once and summed by the receiver: qgZ of ZeRO++
    (arXiv 2306.10209).
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        error_feedback: bool = False,
        block: int = 256,
        only_replicas: bool = False,
    ) -> None:
        expected = "torch.bfloat16, torch.float16, torch.int8 or an 8-bit float"
        if not isinstance(dtype, torch.dtype):
            raise wrong_type("Compress", "dtype", expected, dtype)
        if dtype not in (torch.bfloat16, torch.float16, *CODES):
            raise wrong_value("Compress", "dtype", expected, dtype)
        self.dtype = dtype
        self.error_feedback = check_flag("Compress", "error_feedback", error_feedback)
        if check_count("Compress", "block", block) < 8:
            raise wrong_value("Compress", "block", "an int of at least 8", block)
        self.block = block
        self.only_replicas = check_flag("Compress", "only_replicas", only_replicas)

    def __call__(
        self,
        state: Any,
        packed: Tensor,
        reduced: Tensor,
        group: dist.ProcessGroup,
        exact: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Sum ``packed`` over ``group`` into ``reduced``; do not round the columns ``exact``."""
        if not isinstance(group, dist.ProcessGroup):
            raise wrong_type("Compress", "group", "a process group", group)
        if not isinstance(reduced, Tensor):
            raise wrong_type("Compress", "reduced", "a tensor", reduced)
        if not isinstance(packed, Tensor) or not packed.is_floating_point():
            raise wrong_type("Compress", "packed", "a tensor of floating-point numbers", packed)
        if reduced.numel() not in (packed.numel(), packed.numel() / group.size()):
            raise ConfigError(
                "FS508",
                f"Compress: found {packed.numel()} packed and {reduced.numel()} reduced elements "
                f"for {group.size()} ranks. Pass equal sizes, or one rank's part as reduced.",
            )
        is_replicas = reduced.numel() == packed.numel()
        if self.dtype in CODES:
            if self.error_feedback and not isinstance(state, dict):
                raise wrong_type("Compress", "state", "a dict for rounding errors", state)
            errors: dict[Any, Tensor] | None = state if self.error_feedback else None
            exchange = CodedSum(self.dtype, self.block, errors, exact, group)
            if is_replicas:
                exchange.all_reduce(packed, reduced)
            elif self.only_replicas:
                rows = packed.contiguous()
                torch_comm.reduce_scatter_single(reduced, rows, dist.ReduceOp.SUM, group, False)
            else:
                exchange.reduce_scatter(packed, reduced)
            return
        narrow, factor = self.narrow(state, packed, group.size())
        if is_replicas:
            dist.all_reduce(narrow, group=group)
            reduced.copy_(narrow)
        else:
            output = torch.empty(reduced.shape, dtype=self.dtype, device=reduced.device)
            torch_comm.reduce_scatter_single(output, narrow, dist.ReduceOp.SUM, group, False)
            reduced.copy_(output)
        if factor != 1.0:
            reduced.mul_(factor)

    def narrow(
        self,
        state: dict[Any, Tensor],
        packed: Tensor,
        ranks: int,
    ) -> tuple[Tensor, float]:
        """Divide ``packed`` by a factor, and cast it to ``dtype``; return it and the factor."""
        if not isinstance(packed, Tensor) or not packed.is_floating_point():
            raise wrong_type("Compress", "packed", "a tensor of floating-point numbers", packed)
        check_count("Compress", "ranks", ranks)
        if self.dtype in CODES:
            raise wrong_value("Compress", "dtype", "a 16-bit dtype to cast to", self.dtype)
        if self.error_feedback and not isinstance(state, dict):
            raise wrong_type("Compress", "state", "a dict for rounding errors", state)
        factor = 1.0
        if self.dtype is torch.float16 and packed.dtype is not torch.float16:
            factor = 1.0 / GradientScale.choose(ranks, torch.float16).before
        if self.error_feedback and packed.numel() in state:
            packed = packed + state[packed.numel()]
        narrow = (packed / factor if factor != 1.0 else packed).to(self.dtype)
        if self.error_feedback:
            state[packed.numel()] = (packed - narrow.to(packed.dtype) * factor).nan_to_num_(0, 0, 0)
        return narrow, factor


def register_comm_hook(
    module: nn.Module, hook: Hook | None, state: Any = None, *, recurse: bool = True
) -> None:
    """Reduce the gradients of a module's units with ``hook`` instead of the backend.

    Each reduction of a unit calls the hook once for every axis of every mesh of its parameters. On
    a CPU, reductions with a hook are synchronous. Copying the model copies hooks and states.

    Args:
        module: the model, or a part of it.
        hook: ``hook(state, packed, reduced, group)`` writes the sum over the ranks of ``group``
            into ``reduced``; any division is done by the engine. Both tensors are flat and in the
            reduce dtype. Over a shard axis of W ranks, ``packed`` is ``[W * S]`` and ``reduced`` is
            ``[S]``, this rank's shard, as in a reduce-scatter. Over a replicate axis, both are the
            same tensor ``[S]``. After the gradients, the tensors contain a few values of the
            engine, which must be summed in the same way. On a CPU, the sum must be complete when
            the hook returns; on a device, the hook must use the current stream. For an example, see
            ``Compress``. Pass None to remove hooks.
        state: the first argument of the hook. If None, each unit and axis has a separate dict, in
            which ``Compress`` stores rounding errors.
        recurse: also register the hook for units below ``module``.

    Raises:
        ConfigError: ``module`` contains no unit; ``hook`` is not a function; ``Compress`` was given
            a ``state``; or a custom reduce-scatter or a gradient wire dtype is set.
        StateError: called during a step.

    Source: the method of the same name in torch's ``FullyShardedDataParallel``.
    """
    check_flag("register_comm_hook", "recurse", recurse)
    units = sharded_units("register_comm_hook", "module", module, recurse)
    check_function("register_comm_hook", "hook", hook)
    if isinstance(hook, Compress) and state is not None:
        raise ConfigError(
            "FS505",
            "register_comm_hook: found a state for Compress, which needs a separate state for "
            "each unit and axis. Omit it.",
        )
    groups = [group for unit in units for group in unit.own_groups]
    refuse_during_step("register_comm_hook", units)
    if hook is not None:
        refuse_dealt("register_comm_hook", groups)
        refuse_layers("register_comm_hook", groups)
    for group in groups:
        scatter = group.wire.scatter
        if not isinstance(scatter, DefaultReduceScatter | Hooked):
            raise ConfigError(
                "FS505",
                f"register_comm_hook: {group.fqn or '<root>'} has a custom reduce-scatter, "
                f"{type(scatter).__name__}. Use either this reduce-scatter or a hook.",
            )
        if hook is not None and group.wire.gradient_dtype is not None:
            raise ConfigError(
                "FS505",
                f"register_comm_hook: gradients of {group.fqn or '<root>'} are sent in "
                f"{group.wire.gradient_dtype}, but a hook receives them in the reduce dtype. Call "
                "set_gradient_wire_dtype(None) first.",
            )
    for group in groups:
        if hook is None:
            if isinstance(group.wire.scatter, Hooked):
                group.wire.scatter, group.wire.sum_replicas = DefaultReduceScatter(), None
                group.wire.sum_rows = None
        else:
            group.wire.scatter = hooked = Hooked(hook, {} if state is None else state)
            group.wire.sum_rows = hooked.sum_rows
            group.wire.sum_replicas = Hooked(hook, {} if state is None else state).sum_rows
        group.rewire()


class Hooked(TorchMemory, ReduceScatter):
    """Runs a hook in place of a collective."""

    def __init__(self, hook: Hook, state: Any) -> None:
        self.hook, self._state = hook, state

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        self.sum_rows(input_tensor, output_tensor, group, ())  # wires call sum_rows directly

    def sum_rows(
        self, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup, exact: Exact
    ) -> None:
        """Sum over the shard axis, or in place over the replicate axis; do not round the columns
        ``exact`` of each row."""
        with torch.no_grad():
            if isinstance(self.hook, Compress):
                self.hook(self._state, packed, reduced, group, exact)
            else:
                self.hook(self._state, packed, reduced, group)
