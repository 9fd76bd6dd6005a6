"""``graphed``: a training step that is captured once as a device graph, and replayed.

Decides whether a step is captured, replayed or run eagerly. Owns the static inputs, and the
learning rates that graphs read. The engine's state around a replay is in ``_core.engine.replay``.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.api.settings import no_sync, sharded_units
from fsdp2._core.base import torch_graphs, torch_optim
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.errors import (
    ConfigError,
    UnsupportedError,
    check_count,
    check_function,
    check_number,
    check_optimizer,
    wrong_type,
)
from fsdp2._core.base.warn import warn
from fsdp2._core.engine.replay import GRADIENTS_ELSEWHERE, OTHER_COLLECTIVES, Replayed, Trees
from fsdp2.optim._clip import clip_grad_norm_
from fsdp2.optim._wrapped import Wrapped

logger = logging.getLogger("fsdp2")
Loss = Callable[..., Any]
FP32 = torch.float32


def graphed(
    model: nn.Module,
    optimizer: Any = None,
    *,
    loss: Loss | None = None,
    max_norm: float | None = None,
    warmup: int = 3,
    max_captures: int = 8,
) -> GraphedStep:
    """Return a training step that is captured as a device graph, and then replayed.

    Args:
        model: a sharded model on a device that supports graphs (CUDA).
        optimizer: a ``torch.optim.Optimizer`` that can count steps on the device (its param groups
            get ``capturable=True``), or ``SGD``, which does not count steps. Each call ends with
            the optimizer's step, and clears gradients. None: the call leaves gradients in place.
        loss: called with the model and the step's arguments; returns the loss, or a tuple that
            begins with the loss. None: the model's output is the loss.
        max_norm: clip gradients to this total norm before the optimizer's step.
        warmup: number of eager steps per kind (shapes, dtypes, loss, micro-batch) before a capture.
        max_captures: upper bound on the number of captures. After that, steps that match no graph
            run eagerly, with a warning.

    Raises:
        ConfigError, UnsupportedError: an argument has a wrong type or value; no module is sharded;
            the model is on a CPU, which has no graphs; parameters are kept on the host; the
            optimizer counts steps on the host.

    Source: the public ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables``.
    """
    units = sharded_units("graphed", "model", model)
    check_function("graphed", "loss", loss)
    if max_norm is not None:
        max_norm = check_number("graphed", "max_norm", max_norm, "a non-negative number", 0.0)
    check_count("graphed", "warmup", warmup)
    check_count("graphed", "max_captures", max_captures, 0)
    groups = [group for unit in units for group in unit.own_groups]
    device = next((group.residence.compute for group in groups), units[0].device)
    if torch_graphs.graphs_of(device) is None:
        raise UnsupportedError(
            "FS327",
            f"graphed: the model is on {device}, and device type {device.type!r} has no graphs. "
            "Move it to a CUDA device, or call forward, backward and the optimizer yourself.",
        )
    away = next((group for group in groups if group.residence.is_away), None)
    if away is not None:
        raise UnsupportedError(
            "FS327",
            f"graphed: {away.fqn or '<root>'} keeps its parameters on the host (CPUOffloadPolicy), "
            "so each step contains a host wait, which a graph cannot capture. Omit offload_policy.",
        )
    if check_optimizer("graphed", optimizer) is not None:
        _make_capturable(optimizer)
    elif max_norm is not None:
        raise ConfigError(
            "FS102",
            "graphed: expected max_norm to be None without an optimizer, found a number. Clip "
            "before your own step, with fsdp2.clip_grad_norm_.",
        )
    return GraphedStep(model, device, optimizer, loss, max_norm, warmup, max_captures)


def _make_capturable(optimizer: Any) -> None:
    """Make an optimizer count its steps on the device; raise UnsupportedError if it cannot."""
    groups, name = optimizer.param_groups, type(optimizer).__name__
    counts = any("capturable" not in group for group in groups)
    if isinstance(optimizer, Wrapped) or (counts and type(optimizer) is not torch.optim.SGD):
        raise UnsupportedError(
            "FS718",
            f"graphed: {name} counts its steps on the host, so every replay would use the same "
            "count. Pass a torch optimizer that supports capturable=True (Adam, AdamW, RMSprop and "
            "others), or SGD. Alternatively, pass optimizer=None, and step your optimizer after "
            "each call.",
        )
    if counts:
        return
    for group in groups:
        group["capturable"] = True
    for param, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, Tensor) and step.device != param.device:
            state["step"] = step.to(param.device)
    torch_optim.expect_eager_steps(optimizer)


def _output_is_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@dataclass(eq=False)
class _Kind:
    """The steps that one graph can run. They have equal settings and the same kind of inputs."""

    inputs: Any  # the arguments, with None for each tensor
    tensors: list[tuple[Any, ...]]  # shape, stride, dtype and requires_grad
    facts: tuple[Any, ...]
    eager: int = 0  # steps of this kind that ran eagerly since the last graph
    graph: _Captured | None = None

    def is_like(self, other: _Kind) -> bool:
        is_like = self.tensors == other.tensors and self.facts == other.facts
        return is_like and bool(self.inputs == other.inputs)


class GraphedStep:
    """A training step, returned by ``graphed``. Calling it with a batch returns the loss.

    Attributes:
        loss: the loss function; may be replaced between steps.
        why_eager: the reason why the last step ran eagerly; "" if it was a replay.
        captures: the number of graphs captured so far.
        replays: the number of steps that were replays.
        grad_norm: the gradient norm of the last step before clipping, or None without ``max_norm``.
            The next replay overwrites this tensor, so clone it to keep the value.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optimizer: Any,
        loss: Loss | None,
        max_norm: float | None,
        warmup: int,
        max_captures: int,
    ) -> None:
        self.loss: Loss = _output_is_loss if loss is None else loss
        self.why_eager = ""
        self.captures = self.replays = 0
        self.grad_norm: Tensor | None = None
        self._model, self._optimizer, self._max_norm = model, optimizer, max_norm
        self._device, self._warmup, self._most = device, warmup, max_captures
        self._graphs: Any = torch_graphs.graphs_of(device)
        self._stream: Any = self._graphs.Stream(device=device)
        self._kinds: list[_Kind] = []
        self._trees: Trees | None = None
        self._last_was_replay = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step on a batch: forward, backward, and the optimizer's step if there is one.

        Tensors on the host are copied to the device first. Returns the result of the loss function,
        detached, in separate memory.
        """
        return self._take(args, kwargs, is_last=True)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a micro-batch other than the last. Gradients stay local."""
        return self._take(args, kwargs, is_last=False)

    def reset(self) -> None:
        """Drop all graphs and their memory; later steps are captured again."""
        torch.accelerator.synchronize()  # graphs may still be running
        self._kinds.clear()
        self.captures = 0

    def _take(self, args: Any, kwargs: Any, is_last: bool) -> Any:
        given: list[Tensor] = []
        inputs = map_tensors(given.append, (args, kwargs))  # type: ignore[arg-type]  # returns None
        if self._trees is None or not self._trees.are_current:
            self._trees = self._look_at_trees()
        trees = self._trees
        if self._optimizer is None:  # otherwise gradients of several steps would add up
            trees.clear_gradients()
        kind = self._kind_of(inputs, given, (is_last, trees.are_waiting, self.loss))
        reason = trees.why_not() or self._why_not(given)
        if not reason and kind.graph is not None:
            reason = kind.graph.why_left(self._last_was_replay)
            if reason:
                self._leave(kind, reason)
            else:
                reason = kind.graph.replayed.why_not()
        if not reason and kind.graph is None:
            reason = self._why_not_captured(kind, trees)
            reason = reason or self._capture(kind, args, kwargs, given, is_last)
        self.why_eager, self._last_was_replay = reason, not reason
        if not reason and kind.graph is not None:
            self.replays += 1
            result, self.grad_norm = kind.graph.replay(trees, given), kind.graph.norm
            return result
        kind.eager += 1
        logger.debug("graphed: an eager step: %s", reason)
        return self._run_eagerly(args, kwargs, is_last)

    def _kind_of(
        self,
        inputs: Any,
        given: Sequence[Tensor],
        facts: tuple[Any, ...],
    ) -> _Kind:
        tensors = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in given]
        modes = [module.training for module in self._model.modules()]
        new = _Kind(inputs, tensors, (*facts, modes))
        for kind in self._kinds:
            if kind.is_like(new):
                return kind
        self._kinds.append(new)
        return new

    def _why_not(self, given: Sequence[Tensor]) -> str:
        if any(tensor.requires_grad for tensor in given):
            return "an input requires grad"
        if not torch.is_grad_enabled():
            return "grad mode is off"
        if torch.is_autocast_enabled(self._device.type):
            return "autocast is enabled around the step: enable it in the loss function instead"
        return ""

    def _why_not_captured(self, kind: _Kind, trees: Trees) -> str:
        if kind.eager < self._warmup:
            return f"warm-up {kind.eager + 1} of {self._warmup}"
        if trees.are_waiting and not self._last_was_replay:
            return "earlier micro-batches ran eagerly"
        if self.captures < self._most:
            return ""
        warn(
            "FS328",
            f"graphed: steps were captured {self.captures} times (max_captures), and the current "
            "step matches no graph, so it runs eagerly. Use few shapes, and rarely change "
            "settings. The step's why_eager states the reason.",
        )
        return f"captured {self.captures} times already"

    def _leave(self, kind: _Kind, reason: str) -> None:
        logger.info("graphed: dropping a graph: %s", reason)
        torch.accelerator.synchronize()  # the graph may still be running
        kind.graph, kind.eager = None, max(0, self._warmup - 1)

    def _look_at_trees(self) -> Trees:
        return Trees(self._model, sharded_units("graphed", "model", self._model))

    # Running a step.

    def _run(self, args: Any, kwargs: Any, is_last: bool) -> Any:
        """Run forward, backward and the optimizer's step, eagerly or during a capture."""
        result = self.loss(self._model, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            expected = "a one-element tensor that requires grad, or a tuple that begins with one"
            raise wrong_type("graphed", "the value the loss function returns", expected, result)
        loss.backward()
        if self._optimizer is not None and is_last:
            if self._max_norm is not None:
                params = [p for group in self._optimizer.param_groups for p in group["params"]]
                self.grad_norm = clip_grad_norm_(params, self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return map_tensors(Tensor.detach, result)

    def _run_eagerly(self, args: Any, kwargs: Any, is_last: bool) -> Any:
        current = self._graphs.current_stream()
        self._stream.wait_stream(current)
        with self._graphs.stream(self._stream), self._synced(is_last):
            args, kwargs = map_tensors(self._to_device, (args, kwargs))
            result = self._run(args, kwargs, is_last)
        current.wait_stream(self._stream)
        return result

    def _synced(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if is_last else no_sync(self._model)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True) if tensor.is_cpu else tensor

    def _capture(
        self,
        kind: _Kind,
        args: Any,
        kwargs: Any,
        given: Sequence[Tensor],
        is_last: bool,
    ) -> str:
        """Capture a step without running it; return the reason if it cannot be replayed, or ""."""
        current = self._graphs.current_stream()
        self._trees = trees = self._look_at_trees()
        trees.look()
        self._stream.wait_stream(current)
        with self._graphs.stream(self._stream):
            static = [torch.empty_like(tensor, device=self._device) for tensor in given]
            rates = _Rates(self._optimizer, self._device)
        current.wait_stream(self._stream)
        captured = _Captured(self._graphs, static, rates, Replayed(trees))
        self.captures += 1
        places = iter(static)
        args, kwargs = map_tensors(lambda _: next(places), (args, kwargs))
        try:
            with self._synced(is_last), captured.capturing(self._stream):
                captured.result = self._run(args, kwargs, is_last)
                captured.norm = self.grad_norm
        except Exception as error:
            why = f"capturing failed: {type(error).__name__}: {error}"
            logger.warning("graphed: %s", why, exc_info=True)
            trees.give_up()
            return why
        captured.guards = _Guards(self._model, self._optimizer)
        # the gradients that remain after the step: replays write to their memory
        captured.gradients = [(one, one.grad) for one in trees.params if one.grad is not None]
        kind.graph = captured
        if not captured.replayed.is_expected:
            captured.replayed.undo()
            trees.clear_gradients()
            return OTHER_COLLECTIVES
        return ""


def _reads_rate_on_device(group: dict[str, Any]) -> bool:
    """Return True if the step can read its learning rate on the device; plain SGD cannot."""
    return "lr" in group and ("capturable" in group or bool(group.get("fused")))


class _Rates:
    """An optimizer's learning rates, on the device, so that graphs can read them."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        numbers = [group for group in groups if not isinstance(group.get("lr"), Tensor)]
        self._groups = [group for group in numbers if _reads_rate_on_device(group)]
        self._last = [group["lr"] for group in self._groups]
        self._static = [torch.tensor(rate, dtype=FP32, device=device) for rate in self._last]

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the optimizer read its rates on the device."""
        for group, rate in zip(self._groups, self._static, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(self._groups, self._last, strict=True):
                group["lr"] = number

    def write(self) -> None:
        """Copy changed rates to the device."""
        for index, (group, rate) in enumerate(zip(self._groups, self._static, strict=True)):
            if group["lr"] != self._last[index]:
                rate.fill_(group["lr"])
                self._last[index] = group["lr"]


class _Guards:
    """Host values, and tensors outside of the engine, on which a captured step depends."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._before = self._now()

    def _now(self) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
        """Return the model's tensors, the optimizer's states, and its param groups."""
        tensors: list[Any] = []
        for module in self._model.modules():
            tensors += [*module._parameters.values(), *module._buffers.values()]
        if self._optimizer is None:
            return tensors, [], []
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        groups = []
        for group in self._optimizer.param_groups:
            own = {**group, "params": [id(param) for param in group["params"]]}
            if _reads_rate_on_device(group) and not isinstance(group["lr"], Tensor):
                del own["lr"]  # see _Rates
            groups.append(own)
        return tensors, states, groups

    def why_left(self) -> str:
        """Return the change that invalidates the graph, or "" if there is none."""
        (tensors, states, groups), now = self._before, self._now()
        if not _are(tensors, now[0]):
            return "a parameter or a buffer of the model was replaced"
        if not _are(states, now[1]):
            return "the optimizer's state was replaced, for example by load_state_dict"
        if groups != now[2]:
            return "a param group of the optimizer was changed"
        return ""


def _are(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


@dataclass(eq=False)
class _Captured:
    """One graph, and the memory that it reads and writes."""

    graphs: Any  # torch.cuda, or an equivalent module
    static: list[Tensor]
    rates: _Rates
    replayed: Replayed
    result: Any = None
    norm: Tensor | None = None
    guards: _Guards | None = None
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    _graph: Any = None

    @contextlib.contextmanager
    def capturing(self, stream: Any) -> Iterator[None]:
        self._graph = self.graphs.CUDAGraph()
        with (
            torch_graphs.capture(self._graph, self.graphs, stream),
            self.replayed.captured(),
            self.rates.on_device(),
        ):
            yield

    def why_left(self, follows_graph: bool) -> str:
        """Return the reason why the graph is no longer valid, or "" if it is valid."""
        if not self.replayed.is_planned:
            return "a setting or the addresses of parameters changed"
        if follows_graph and not self.replayed.finds_gradients:
            return GRADIENTS_ELSEWHERE
        assert self.guards is not None
        return self.guards.why_left()

    def replay(self, trees: Trees, given: Sequence[Tensor]) -> Any:
        """Replay the captured step on a batch."""
        trees.look()
        for place, tensor in zip(self.static, given, strict=True):
            place.copy_(tensor, non_blocking=True)
        self.rates.write()
        self._graph.replay()
        self.replayed.end()
        for param, grad in self.gradients:
            param.grad = grad
        return map_tensors(Tensor.clone, self.result)
