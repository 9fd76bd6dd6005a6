"""Traces of blocks: one trace is used for all identical blocks, in every plan of the same model.

A trace records the bytes, kernels and saved memory of a unit's forward and backward. A replay is
one autograd node with the same memory and time. The engine's work around a unit is never replayed.

[Note: when a block is replayed]
The layers of a model run the same operations, so planning each layer would repeat the same work. A
block is a unit without inner units. The forward of a block is traced, first alone and then together
with the backward; afterwards, an autograd node replaces the block. A block cannot be replaced, and
runs normally, if it returns its input, stores tensors, changes its attributes, reads other modules'
parameters, takes or returns values that are neither tensors nor plain values, or has many forms.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_autograd, torch_dtensor, torch_tensors
from fsdp2._core.base.containers import map_tensors
from fsdp2._tools.plan.clock import ComputeTime
from fsdp2._tools.plan.stepped import Stepped, step_all
from fsdp2._tools.plan.watch import MemoryWatch, number_of

PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
NUMBERS = {"layer_idx", "layer_id", "layer_number", "index", "idx"}
"""Attributes that contain a block's position, which is not part of its form."""
MOST_FORMS = 6
"""Maximum number of traces per class and plan: if all blocks differ, they run faster untraced."""

Forward = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Kept = tuple[tuple[int, ...], set[int], tuple[int, ...]]
"""Indices of the inputs, outputs and parameters that a block's graph keeps. Those of parameters
follow those of inputs."""


class Unsuited(Exception):  # noqa: N818  # not an error: the block runs normally
    """Raised for a block that an autograd node cannot replace."""


class End(torch.autograd.Function):
    """A node after a block. Its backward creates a gradient that has no other references."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = (x.shape, x.dtype, x.device)
        return x.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


class Start(torch.autograd.Function):
    """A node before a block. It creates a tensor with autograd history and no other references."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, like: Tensor) -> Tensor:
        ctx.numel = seed.numel()
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_empty(ctx.numel, dtype=torch.float32), None


def structure_of(block: nn.Module) -> Iterator[Any]:
    """Yield the form of a block: classes, modes, plain attributes and buffers."""
    for name, module in block.named_modules():
        attributes = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, PLAIN) and key not in NUMBERS and not key.startswith("_")
        )
        yield name, type(module), tuple(map(repr, attributes)), tuple(module._parameters)
    for name, buffer in block.named_buffers():
        yield name, buffer.shape, buffer.dtype


def attributes_of(block: nn.Module) -> list[tuple[int, str, int]]:
    """Return a snapshot of a block's attributes, to detect whether a forward changes them."""
    return [
        (id(module), key, id(value))
        for module in block.modules()
        for key, value in (*vars(module).items(), *module._buffers.items())
        if key != "forward"
    ]


@contextmanager
def with_own_parameters(block: nn.Module) -> Iterator[list[Tensor]]:
    """Temporarily replace a block's parameters with new ones that share their memory."""
    places = [
        (module, name, param)
        for module in block.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    if torch_dtensor.is_among([type(param) for _, _, param in places]):
        raise Unsuited
    made: dict[int, nn.Parameter] = {}
    for module, name, param in places:
        if id(param) not in made:
            made[id(param)] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        module._parameters[name] = made[id(param)]
    try:
        yield list(block.parameters())
    finally:
        for module, name, param in places:
            module._parameters[name] = param


def fresh_like(tensor: Tensor, into: list[Tensor]) -> Tensor:
    if tensor.requires_grad:
        seed = torch.empty(1, device=tensor.device, dtype=torch.float32, requires_grad=True)
        made: Tensor = Start.apply(seed, tensor.detach())  # type: ignore[no-untyped-call]  # torch's own
    else:
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        made = torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)
    into.append(made)
    return made


def form_of(value: Any, tensors: list[Tensor], names: Mapping[int, str] = {}) -> Any:
    """Return a key for values; append their tensors to ``tensors``. ``names``: modules' names."""
    if isinstance(value, Tensor):
        if torch_dtensor.is_among([type(value)]):
            raise Unsuited
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    if type(value) in (tuple, list):
        return (type(value), *(form_of(one, tensors, names) for one in value))
    if type(value) is dict:
        return tuple((str(key), form_of(one, tensors, names)) for key, one in value.items())
    if isinstance(value, nn.Module) and id(value) in names:
        return (nn.Module, names[id(value)])
    if isinstance(value, PLAIN):
        return value
    raise Unsuited


def rebuilt(like: Any, tensors: Sequence[Tensor]) -> Any:
    left = iter(tensors)
    return map_tensors(lambda _: next(left), like)


def check_leaves(nodes: Sequence[Any], own: Sequence[Tensor]) -> None:
    """Raise Unsuited if a graph reaches a leaf that is neither an input nor a block parameter."""
    mine = {id(one) for one in own}
    starts = {id(one.grad_fn) for one in own if one.grad_fn is not None}
    todo, seen = [node for node in nodes if node is not None], set()
    while todo:
        node = todo.pop()
        if id(node) in starts or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in mine:
            raise Unsuited
        todo += [after for after, _ in node.next_functions if after is not None]


@dataclass(frozen=True)
class Made:
    """A tensor that a block returns. ``is_kept``: the block's backward needs it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_kept: bool


@dataclass(frozen=True)
class Phase:
    """Cost of a forward or a backward: seconds of each kernel, peak of the additional memory in
    bytes, and total seconds of matmuls."""

    kernels: tuple[float, ...]
    peak_nbytes: int
    products: float


@dataclass(frozen=True)
class Trace:
    """A block's forward and backward. ``held``, ``read``: indices of the inputs and parameters that
    backward needs. ``has_grad``: whether each input and parameter gets a gradient."""

    forward: Phase
    backward: Phase
    outputs: tuple[Made, ...]
    rebuild: Callable[[Sequence[Tensor]], Any]
    kept_nbytes: int
    held: tuple[int, ...]
    read: tuple[int, ...]
    has_grad: tuple[bool, ...]


@dataclass
class Traces:
    """Traces: of blocks, by form (None: not replaced); of optimizers, with their states' bytes."""

    known: dict[tuple[Any, ...], Trace | None] = field(default_factory=dict)
    optimizers: dict[tuple[Any, ...], tuple[Phase, int]] = field(default_factory=dict)


class Replayed(torch.autograd.Function):
    """Replaces a block, with the same outputs, saved memory, and cost of forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        trace: Trace,
        replayer: Replayer,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        replayer.replay(trace.forward)
        device = given[0].device if given else torch.device("cpu")
        made = [
            torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
            for one in trace.outputs
        ]
        pairs = list(zip(made, trace.outputs, strict=True))
        ctx.trace, ctx.replayer = trace, replayer
        ctx.like = [(one.shape, one.stride(), one.dtype) for one in given]
        ctx.held = [given[place] for place in trace.held]
        # the engine checks whether a graph references parameters, as the block's graph does
        ctx.save_for_backward(*(given[place] for place in trace.read))
        ctx.held += [one.detach() for one, how in pairs if how.is_kept]
        if trace.kept_nbytes > 0:
            ctx.held.append(torch.empty(trace.kept_nbytes, dtype=torch.uint8, device=device))
        ctx.mark_non_differentiable(*(one for one, how in pairs if not how.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        trace: Trace = ctx.trace
        ctx.replayer.replay(trace.backward)
        ctx.held.clear()
        device = grads[0].device
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) if has_grad else None
            for (shape, stride, dtype), has_grad in zip(ctx.like, trace.has_grad, strict=True)
        ]
        return None, None, *made


class Replayer:
    """Replaces the forwards of blocks with replays, in one run. ``is_used``: False if they and the
    optimizer run normally."""

    def __init__(
        self,
        traces: Traces,
        watch: MemoryWatch,
        compute: ComputeTime,
    ) -> None:
        self._traces, self._watch, self._compute = traces, watch, compute
        self._is_again = self.is_used = False
        self._forms: Counter[type] = Counter()  # number of traces of each class in this plan
        self._structures: dict[int, tuple[Any, ...]] = {}
        self._names: dict[int, str] = {}
        self._machine = repr(compute.clock.hardware)  # part of each trace's key

    def begin_plan(self, is_again: bool) -> None:
        """Start another plan. ``is_again``: activations are recomputed."""
        self._is_again = is_again
        self._forms.clear()

    def follow(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Replay ``blocks`` of a model from now on."""
        self.is_used = True
        self._names = {id(module): name for name, module in model.named_modules()}
        for block in blocks:
            block.forward = functools.partial(self._call, block, block.forward)

    def _call(
        self,
        block: nn.Module,
        forward: Forward,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if torch_autograd.is_in_checkpoint():  # it counts saved tensors; tracing would add more
            return forward(*args, **kwargs)
        try:
            tensors, key = self._key_of(block, (args, kwargs))
        except Unsuited:
            return forward(*args, **kwargs)
        known = self._traces.known
        if key not in known:
            if self._forms[type(block)] >= MOST_FORMS:
                return forward(*args, **kwargs)
            self._forms[type(block)] += 1
            try:
                known[key] = self._trace(block, forward, (args, kwargs))
            except Unsuited:
                known[key] = None
        trace = known[key]
        if trace is None:
            return forward(*args, **kwargs)
        made = Replayed.apply(trace, self, *tensors, *block.parameters())  # type: ignore[no-untyped-call]  # torch's own
        return trace.rebuild(made)

    def _key_of(self, block: nn.Module, given: Arguments) -> tuple[list[Tensor], tuple[Any, ...]]:
        tensors: list[Tensor] = []
        form = form_of(given, tensors, self._names)
        if id(block) not in self._structures:
            self._structures[id(block)] = tuple(structure_of(block))
        own = tuple((p.shape, p.dtype, p.requires_grad) for p in block.parameters())
        where = (self._machine, self._is_again, torch.is_grad_enabled())
        return tensors, (self._structures[id(block)], own, form, where)

    def _trace(self, block: nn.Module, forward: Forward, given: Arguments) -> Trace:
        with with_own_parameters(block) as parameters, self._aside():
            before, attributes = self._watch.nbytes, attributes_of(block)
            held = self._keep_of(forward, given, parameters)
            found = self._measure(forward, given, parameters, held)
            if self._watch.nbytes != before or attributes_of(block) != attributes:
                raise Unsuited  # the block keeps a tensor for later
            return found

    def _keep_of(self, forward: Forward, given: Arguments, parameters: Sequence[Tensor]) -> Kept:
        """Run a forward, release its inputs and outputs, and return which of them still exist."""
        # create these first: they also reference the parameters
        accumulators = torch_autograd.accumulators_of(parameters)
        owners = [torch_tensors.owners_of(one) for one in parameters]
        fresh: list[Tensor] = []
        args, kwargs = map_tensors(lambda t: fresh_like(t, fresh), given)
        inputs = [number_of(one) for one in fresh]
        out = forward(*args, **kwargs)
        made: list[Tensor] = []
        form_of(out, made)
        outputs = [number_of(one) for one in made]
        if len({*inputs, *outputs}) != len(inputs) + len(outputs) or not made:
            raise Unsuited  # inputs and outputs share memory, or there is no output
        nodes = [one.grad_fn for one in made]
        args = kwargs = out = None
        fresh.clear()
        made.clear()
        held, kept = (
            [place for place, number in enumerate(numbers) if self._watch.is_alive(number)]
            for numbers in (inputs, outputs)
        )
        more = [torch_tensors.owners_of(one) for one in parameters]
        read = [place for place, before in enumerate(owners) if more[place] > before]
        del nodes, accumulators
        return tuple(held), set(kept), tuple(len(inputs) + place for place in read)

    def _measure(
        self, forward: Forward, given: Arguments, parameters: Sequence[Tensor], kept: Kept
    ) -> Trace:
        held, kept_outputs, read = kept
        fresh: list[Tensor] = []
        args, kwargs = map_tensors(lambda t: fresh_like(t, fresh), given)
        before = self._watch.nbytes
        out, first = self.timed(functools.partial(forward, *args, **kwargs))
        made: list[Tensor] = []
        form_of(out, made)
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        rebuild = functools.partial(rebuilt, map_tensors(lambda _: nothing, out))
        sizes = [one.untyped_storage().nbytes() for one in made]
        if sizes != [one.nbytes for one in made]:
            raise Unsuited
        outputs = tuple(
            Made(one.shape, one.stride(), one.dtype, one.requires_grad, place in kept_outputs)
            for place, one in enumerate(made)
        )
        kept_nbytes = self._watch.nbytes - before - sum(sizes)
        ends = [End.apply(one) for one in made if one.requires_grad]  # type: ignore[no-untyped-call]  # torch's own
        wanted = [one for one in (*fresh, *parameters) if one.requires_grad]
        second = Phase((), 0, 0.0)
        found: Iterator[bool] = iter(())
        if ends and wanted:
            check_leaves([one.grad_fn for one in made], [*fresh, *parameters])
            arriving = sum(one.nbytes for one in made if one.requires_grad)
            seeds = [torch.empty_like(end) for end in ends]
            del out, made, args, kwargs
            grads, second = self.timed(
                lambda: torch.autograd.grad(ends, wanted, seeds, allow_unused=True), arriving
            )
            found = iter([grad is not None for grad in grads])
        has_grad = tuple(one.requires_grad and next(found) for one in (*fresh, *parameters))
        return Trace(first, second, outputs, rebuild, kept_nbytes, held, read, has_grad)

    def timed(self, run: Callable[[], Any], arriving: int = 0) -> tuple[Any, Phase]:
        """Call ``run``, and return its result and cost. Raise Unsuited if it allocates anything but
        activations. ``arriving``: bytes allocated at the start, which are not counted."""
        watch, taken = self._watch, list[tuple[float, float]]()
        before, kinds = watch.nbytes, list(watch.by_kind)
        watch.take_highest()
        with self._compute.aside(taken):
            made = run()
        highest = watch.take_highest()
        if any(now != then for now, then in zip(highest[:-2], kinds[:-2], strict=True)):
            raise Unsuited  # the block allocates memory of other kinds
        if highest[-1] != kinds[-1]:
            raise Unsuited  # the block computes logits, which are counted separately
        above = max(sum(highest) - before - arriving, 0)
        kernels = tuple(seconds for seconds, _ in taken)
        return made, Phase(kernels, above, sum(product for _, product in taken))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Exclude the operations in this context from the peak memory and from the clock."""
        highest = self._watch.highest
        try:
            with self._compute.aside([]):
                yield
        finally:
            self._watch.highest = highest

    def replay(self, phase: Phase) -> None:
        self._watch.rise(phase.peak_nbytes)
        clock = self._compute.clock
        for seconds in phase.kernels:
            clock.compute(seconds)
        clock.products += phase.products

    def state_nbytes_of(self, optimizer: tuple[Any, ...]) -> int | None:
        """Return the size of an optimizer's state, if a step on these shards was traced."""
        _, nbytes = self._traces.optimizers.get((self._machine, *optimizer), (None, None))
        return nbytes

    def step_optimizer(self, optimizer: tuple[Any, ...], stepped: Sequence[Stepped]) -> None:
        """Run a step. The first one is traced; later ones are replayed."""
        known, key = self._traces.optimizers, (self._machine, *optimizer)
        if key not in known:
            _, phase = self.timed(functools.partial(step_all, stepped))
            known[key] = phase, sum(one.nbytes for one in stepped)
        self.replay(known[key][0])
