"""Optimizers that step on local shards instead of DTensors, joined where possible (``_runs``)."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler, torch_dealt, torch_dtensor, torch_tensors
from fsdp2._core.base.errors import (
    ConfigError,
    FSDPError,
    UnsupportedError,
    carrying,
    check_flag,
    check_mapping,
    named,
    translated,
    wrong_type,
    wrong_value,
)
from fsdp2._core.params.param import OwnerMark
from fsdp2.optim._blocks import Probe, StatesInBlocks, is_apart, is_tensor
from fsdp2.optim._runs import Granule, Run, StepPlan
from fsdp2.optim._wrapped import (
    Groups,
    State,
    Table,
    Wrapped,
    as_table,
    in_order,
    loss_of,
    params_of,
    plain_step,
    wrapped_class,
    write_back,
)

# Steps all runs of a param group with one call of torch's fused Adam kernel and one step counter.

VARIANTS = (torch.optim.Adam, torch.optim.AdamW)  # classes whose fused step runs this kernel


class FusedAdam:
    """The fused kernel's arguments for one plan's runs, except gradients and hyperparameters."""

    def __init__(self, runs: Sequence[Run], lists: Sequence[list[Tensor]]) -> None:
        self._runs = runs
        self._lists = lists  # parameters, means, squares and, with amsgrad, maxima
        self._counter = runs[0].state["step"].clone()

    @staticmethod
    def of(plan: StepPlan, group: dict[str, Any]) -> FusedAdam | None:
        """Return the kernel for a plan's runs, or None if the class itself must step them."""
        runs = plan.runs
        if not _suits(group) or plan.plain or not runs:
            return None
        names = ["exp_avg", "exp_avg_sq"]
        if group["amsgrad"]:
            names.append("max_exp_avg_sq")
        if any(set(run.state) != {"step", *names} for run in runs):
            return None
        lists = [[run.tensor for run in runs]]
        lists += [[run.state[name] for run in runs] for name in names]
        kinds = {(value.dtype, value.device) for values in lists for value in values}
        steps = [run.state["step"] for run in runs]
        device, first = lists[0][0].device, steps[0]
        if len(kinds) > 1 or not lists[0][0].is_floating_point():
            return None
        if any((s.dim(), s.dtype, s.device) != (0, torch.float32, device) for s in steps):
            return None
        if not bool((torch.stack(steps) == first).all()):
            return None
        return FusedAdam(runs, lists)

    def takes(self, grads: Sequence[Tensor], group: dict[str, Any]) -> bool:
        """Return True if the kernel fits this step: the conditions checked in ``of`` still hold."""
        uses_amsgrad = len(self._lists) == 4
        if not _suits(group) or bool(group["amsgrad"]) is not uses_amsgrad:
            return False
        dtype = self._lists[0][0].dtype
        return all(grad.dtype is dtype for grad in grads)

    def step(self, grads: list[Tensor], group: dict[str, Any]) -> None:
        params, means, squares, *maxima = self._lists
        beta1, beta2 = group["betas"]
        self._counter += 1
        kernel = (
            torch_tensors.fused_adamw
            if group["decoupled_weight_decay"]
            else torch_tensors.fused_adam
        )
        kernel(
            params,
            grads,
            means,
            squares,
            maxima[0] if maxima else [],
            [self._counter] * len(params),
            amsgrad=bool(maxima),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )

    def settle(self) -> None:
        for run in self._runs:
            run.state["step"].copy_(self._counter)


def _suits(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return group.get("fused") is True and all(isinstance(n, int | float) for n in numbers)


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Classes that update each element from its own value, gradient and state alone."""

MIXING: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Muon,
)
"""Classes in which an element's update depends on other elements or on the loss."""

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States of ``ELEMENTWISE`` classes that are 0-dim for parameters of any shape."""

CACHE_LINE_NBYTES = 64
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def local(
    cls: type[OptimizerT],
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
    *,
    elementwise: bool = False,
    **kwargs: Any,
) -> OptimizerT:
    """Make an optimizer of class ``cls`` whose steps run on local shards.

    The result is an instance of ``cls``, with its arguments, param groups, hooks and state, so
    learning-rate schedulers, ``GradScaler`` and checkpoints work as with the plain optimizer.
    Parameters of one param group that are adjacent in their unit's flat buffer step as one tensor
    (or one tensor per distinct value of ``step``). All other parameters step individually, on their
    local tensors. Parameters, gradients and states remain DTensors for the user. ``state`` and
    ``state_dict()`` return views of the memory that steps update, with the parameters' placements.
    0-dim states such as ``step`` are copied whenever ``state`` is read. The next step uses all
    changes made through ``state``.

    Results are bitwise equal to those of ``cls`` on the DTensors with the same arguments (for a
    user-defined class on a CPU, if rounding in its kernels is independent of element positions). If
    ``foreach`` is None, parameters step in a loop, as in torch for DTensors. If torch has no
    ``DTensor`` kernels (fused SGD, fused Adagrad, Rprop), results equal those on local tensors.

    Args:
        cls: SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD or Rprop of
            ``torch.optim``; any other class only with ``elementwise=True``.
        params: as for ``cls``; sharded, tensor-parallel and plain parameters of any dtype.
        elementwise: declares that a user-defined or third-party class is element-wise. The class
            must update each element from its own value, gradient and states alone, and keep no data
            about parameters between steps except its states. The first step updates each parameter
            separately. If all states are plain tensors that are 0-dim or have the parameter's
            shape, later steps update adjacent parameters as one tensor. Other states (codes and
            scales of an 8-bit optimizer's blocks) are saved for the full parameter if no shard
            boundary splits a block, which ``fsdp2.Aligned(None, multiple_of=256, at_least=4096)``
            ensures. To find the layout of such states, fsdp2 runs one step of the class on zeros of
            a shard's shape. If a block is split, the states are valid for this rank's shards only,
            and ``state_dict()`` raises an error: save them with ``local_state_dict()`` or
            ``fsdp2.checkpoint.local_state``.
        kwargs: the arguments of ``cls``.

    Raises:
        ConfigError: a class that is not known to be element-wise, or is known not to be; arguments
            that a class of ``torch.optim`` rejects.
        UnsupportedError: ``capturable=True`` or ``differentiable=True``; a class whose ``step``
            requires a closure, because that class computes the loss in the middle of a step.

    Source: the optimizers of ``torch.optim``; only the location of their values differs.
    """
    who = "fsdp2.optim.local"
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise wrong_type(who, "cls", "a subclass of torch.optim.Optimizer", cls)
    check_flag(who, "elementwise", elementwise)
    _check_class(cls, elementwise)
    try:
        made = wrapped_class("Local", LocalOptimizer, cls)
        optimizer: OptimizerT = made(params, **kwargs)
        check_groups(cls, optimizer.param_groups)
    except FSDPError:
        raise
    except Exception as error:
        if cls not in ELEMENTWISE:  # errors of user-defined classes are not translated
            raise
        raise translated(f"{who}: {cls.__name__} rejected its arguments", error) from error
    return optimizer


def _check_class(cls: type[Optimizer], is_vouched_for: bool) -> None:
    if cls in ELEMENTWISE:
        return
    if not is_vouched_for or cls in MIXING:
        known = ", ".join(c.__name__ for c in ELEMENTWISE)
        way = (
            f"elementwise=True does not make {cls.__name__} element-wise."
            if cls in MIXING
            else f"If {cls.__name__} is element-wise, pass elementwise=True."
        )
        raise ConfigError(
            "FS702",
            f"fsdp2.optim.local: {cls.__name__} is not known to be element-wise, but on local "
            "shards only element-wise optimizers give the same results as on full parameters. Use "
            f"one of {known}; fsdp2.optim.whole, if {cls.__name__} steps parameters independently; "
            f"or {cls.__name__} itself on the DTensors. {way}",
        )
    if needs_closure(cls):
        raise UnsupportedError(
            "FS703",
            f"fsdp2.optim.local: {cls.__name__}.step requires a closure, so it computes the loss "
            "during a step, but a step on local shards needs gradients beforehand. Use "
            f"{cls.__name__} itself on the DTensors.",
        )


def needs_closure(cls: type[Optimizer]) -> bool:
    """Return True if ``cls.step`` requires a closure, and so computes the loss within the step."""
    closure = [*inspect.signature(cls.step).parameters.values()][1:2]
    return bool(
        closure and closure[0].default is closure[0].empty and closure[0].kind in POSITIONAL
    )


class LocalOptimizer(Wrapped):
    """The base class of ``local``'s optimizers. A step keeps states in plans. Reading ``state``
    moves them to a table, from which the next step creates new plans.
    """

    def _start(self) -> None:
        self._table: Table = defaultdict(dict)
        self._plans: list[StepPlan] | None = None
        self._inside: Table | None = None
        self._kernels: list[FusedAdam] = []
        self._known: set[int] = set()
        # Adjacent parameters are joined once a step has shown that their states can be split again.
        self._joins = self._plain_class in ELEMENTWISE

    @property
    def state(self) -> Table:
        """States, keyed by parameter; during a step, keyed by local tensor."""
        if self._inside is not None:
            return self._inside
        if self._plans is not None:
            self._publish()
        return self._table

    @state.setter
    def state(self, table: Table) -> None:
        self._table, self._plans, self._kernels = as_table(table), None, []
        self._place_scalars()

    def _place_scalars(self) -> None:
        """Give states of 0-dim parameters the placements of their parameters, because torch's
        checkpoints load such states as plain tensors. Counters stay plain: ``COUNTERS`` in a known
        class, and all states that are never DTensors in any other class.
        """
        entries = [(p, e) for p, e in self._table.items() if isinstance(p, DTensor) and not p.dim()]
        if not entries:
            return
        shaped = {
            key
            for entry in self._table.values()
            for key, value in entry.items()
            if isinstance(value, DTensor)
        }
        is_known = self._plain_class in ELEMENTWISE
        for param, entry in entries:
            for key, value in entry.items():
                if isinstance(value, Tensor) and not value.dim():
                    is_counter = key in COUNTERS if is_known else key not in shaped
                    local = torch_dtensor.local_part(value)
                    entry[key] = local if is_counter else torch_dtensor.placed_like(param, local)

    def _publish(self) -> None:
        self._settle()
        plans, self._plans = self._plans, None
        known = len(self._table)
        with torch.no_grad():
            for plan in plans or ():
                plan.publish(self._table)
                self._known |= plan.storages()
        if len(self._table) != known:  # plans add states in the order of runs
            self._table = in_order(self._table, self.param_groups)

    def _settle(self) -> None:
        kernels, self._kernels = self._kernels, []
        with torch.no_grad():
            for kernel in kernels:
                kernel.settle()

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a step. ``closure`` recomputes the loss and gradients; its result is returned.

        Raises:
            UnsupportedError: a param group enables ``capturable`` or ``differentiable``.
        """
        loss = loss_of(closure)
        groups = self.param_groups
        check_groups(self._plain_class, groups)
        with torch.no_grad():
            plans, grads = self._plan(groups)
            if any(group.get("fused") for group in groups):
                runs = [run for plan in plans for run in plan.runs]
                grads = [_laid_like(r.tensor, g) for r, g in zip(runs, grads, strict=True)]
            if not self._step_fused(plans, groups, grads):
                self._step_with(plans, groups, grads)
            for plan in plans:
                increment_version(plan.written)
            if not self._joins and all(r.has_parts() for plan in plans for r in plan.runs):
                self._joins = True
                self._publish()  # the next step makes new plans
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's ``state_dict``, with DTensors.

        States in blocks are saved as plain tensors that each cover the full parameter; see
        [Note: states in blocks] in ``_blocks``.

        Raises:
            UnsupportedError: a state is only valid for this rank's shards.
        """
        state = self.local_state_dict()
        for number, param in enumerate(params_of(self.param_groups)):
            entry = self.state.get(param)
            if not entry or not isinstance(param, DTensor) or param.device_mesh.size() == 1:
                continue
            if is_apart(entry, param):  # no step has run since the state was loaded
                state["state"][number] = dict(entry)
                continue
            odd = [
                key for key, value in entry.items() if is_tensor(value) and not _has_parts(value)
            ]
            if not odd and torch_dtensor.local_tensor(param).numel():
                continue
            blocks = self._blocks_of(param)
            if blocks is not None:
                state["state"][number] = blocks.apart(entry)
            elif odd:
                raise UnsupportedError(
                    "FS704",
                    f"fsdp2.optim.local({self._plain_class.__name__}).state_dict: {', '.join(odd)} "
                    "have neither the parameter's shape nor one element. They belong to this "
                    f"rank's shard of shape {tuple(torch_dtensor.local_tensor(param).shape)}, but "
                    "a full or sharded checkpoint would load them on other ranks. Save "
                    "fsdp2.checkpoint.local_state(model, optimizer) on each rank.",
                )
        return state

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Load like the plain optimizer. States in blocks keep their dtypes."""
        given = check_mapping("load_state_dict", "state_dict", state_dict)
        groups, values = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list | tuple) or not isinstance(values, Mapping):
            expected = "a dict that contains a list 'param_groups' and a dict 'state'"
            raise wrong_value("load_state_dict", "state_dict", expected, given)
        reduced, in_blocks = dict(values), dict[Tensor, State]()
        pairs = zip(params_of(groups), params_of(self.param_groups), strict=False)
        for key, param in pairs:  # the class reports mismatches itself
            entry = reduced.get(key)
            if isinstance(entry, dict) and is_apart(entry, param):
                in_blocks[param] = {k: v for k, v in entry.items() if is_tensor(v)}
                reduced[key] = {k: v for k, v in entry.items() if not is_tensor(v)}
        load = cast(Any, super()).load_state_dict
        load({**state_dict, "state": reduced}, *args, **kwargs)
        for param, parts in in_blocks.items():
            self._table[param].update(parts)

    def _block_state_room(
        self,
        param: Tensor,
        key: str,
        shape: tuple[int, ...],
    ) -> Tensor | None:
        """Allocate the tensor for loading a state in blocks, or return None for any other state."""
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            return None
        if shape == tuple(param.shape) and "." not in key:
            return None
        blocks = self._blocks_of(param)
        if blocks is None or key not in blocks.parts:
            return None
        room = blocks.placed(key, None)
        if tuple(room.shape) != shape:
            raise UnsupportedError(
                "FS704",
                f"{_name_of(param)}: found {key} of shape {shape}, expected "
                f"{tuple(room.shape)}, the total over this model's shards. Save and load with "
                "fsdp2.Aligned in shard_placement_fn, so that no shard splits a block of the "
                "optimizer's states.",
            )
        return room

    def _blocks_of(self, param: DTensor) -> StatesInBlocks | None:
        """Return a parameter's states in blocks, or None if the class has none or a probe fails."""
        if self._plain_class in ELEMENTWISE:
            return None
        name = f"fsdp2.optim.local({self._plain_class.__name__}): {_name_of(param)}"
        try:
            return StatesInBlocks.of(name, param, self._probe_for(param))
        except FSDPError:
            raise
        except Exception:  # any exception, for example from schedulefree in evaluation mode
            return None

    def _probe_for(self, param: Tensor) -> Probe:
        """Return a probe that creates the states that the class would create for ``param``."""
        groups = self.param_groups
        index = next(i for i, g in enumerate(groups) if any(p is param for p in g["params"]))

        def probe(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
            leaf = torch.zeros(tuple(shape), dtype=dtype, device=device)
            leaf.grad = torch.zeros_like(leaf)
            own = [{**group, "params": []} for group in groups]
            own[index]["params"] = [leaf]
            inside: Table = defaultdict(dict)
            # restore the random number generators: a probe must not affect training
            is_host = device.type in ("cpu", "meta")  # the host's generator is always restored
            devices, kind = ([], "cuda") if is_host else ([device], device.type)
            with (
                torch.random.fork_rng(devices, device_type=kind),
                torch.compiler.set_stance("force_eager"),
                torch.no_grad(),
            ):
                self._step_plain(inside, own)
            return inside[leaf]

        return probe

    def local_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with rank-local states, which only this rank can load."""
        return cast(Any, super()).state_dict()  # type: ignore[no-any-return]  # of the class

    def _step_fused(
        self,
        plans: list[StepPlan],
        groups: Groups,
        grads: list[Tensor],
    ) -> bool:
        """Run one fused kernel per param group, if equivalent; return True if the kernels ran."""
        # attributes that GradScaler sets on a fused optimizer
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if self._plain_class in VARIANTS and not scaled and not self._kernels:
            kernels = [FusedAdam.of(*pair) for pair in zip(plans, groups, strict=True)]
            known = [kernel for kernel in kernels if kernel is not None]
            if len(known) == len(kernels):  # otherwise other plans may have no counters yet
                self._kernels = known
        if not self._kernels:
            return False
        counts = itertools.accumulate((len(plan.runs) for plan in plans), initial=0)
        parts = [grads[start:end] for start, end in itertools.pairwise(counts)]
        triples = list(zip(self._kernels, parts, groups, strict=True))
        if scaled or not all(kernel.takes(own, group) for kernel, own, group in triples):
            self._settle()
            return False
        for kernel, own, group in triples:
            kernel.step(own, group)
        return True

    def _plan(self, groups: Groups) -> tuple[list[StepPlan], list[Tensor]]:
        """Return the plans (new ones if the old ones are invalid), and the gradient of each run."""
        plans = self._plans or []
        if len(plans) == len(groups):
            pairs = zip(plans, groups, strict=True)
            found = [plan.gradients(group["params"]) for plan, group in pairs]
            grads = [grad for own in found if own is not None for grad in own]
            if None not in found:
                return plans, grads
        self._publish()
        plans, grads = [], []
        self._place_states(groups)
        for group in groups:
            granule: Granule = functools.partial(_granule, bool(group.get("fused")))
            if not self._joins:  # it may be impossible to split states
                granule = _never
            plan = StepPlan(group["params"], self._table, granule, self._known)
            own = plan.gradients(group["params"])
            if own is None:  # gradients need redistribution
                plan = StepPlan(group["params"], self._table, _never, self._known)
                own = plan.loose_gradients()
            plans.append(plan)
            grads += own
        self._plans, self._known = plans, set()
        return plans, grads

    def _place_states(self, groups: Groups) -> None:
        """Place states like their parameters; ranks use the same order even if plans differ."""
        with named("step of an optimizer: a state placed differently"), carrying():
            for param in params_of(groups):
                entry = self._table.get(param)
                if entry is None or not isinstance(param, DTensor):
                    continue
                blocks = self._blocks_of(param) if is_apart(entry, param) else None
                if blocks is None:
                    torch_dealt.place_like(param, entry)
                else:
                    self._table[param] = blocks.together(entry, self._probe_for(param))

    def _step_with(
        self,
        plans: list[StepPlan],
        groups: Groups,
        grads: list[Tensor],
    ) -> None:
        inside: Table = defaultdict(dict)
        own_groups = []
        for plan, group in zip(plans, groups, strict=True):
            own = {**group, "params": plan.targets}
            if plan.runs and own.get("foreach", ...) is None and not own.get("fused"):
                own["foreach"] = False  # torch's choice for DTensors
            own_groups.append(own)
            inside.update((run.tensor, run.state) for run in plan.runs)
            inside.update((param, self._table[param]) for param in plan.plain)
        runs = [run for plan in plans for run in plan.runs]
        try:
            for run, grad in zip(runs, grads, strict=True):
                if run.tensor.grad_dtype is not grad.dtype:  # the user set it on the parameter
                    run.tensor.grad_dtype = grad.dtype
                run.tensor.grad = grad
            self._step_plain(inside, own_groups)
        finally:
            for run in runs:
                run.tensor.grad = None  # [Note: reused gradients]
                run.state = inside[run.tensor]
        for own, group in zip(own_groups, groups, strict=True):
            write_back(group, own, "foreach")

    def _step_plain(self, inside: Table, own_groups: Groups) -> None:
        groups = self.param_groups
        self._inside, self.param_groups = inside, own_groups
        try:
            plain_step(self._plain_class)(self)
        finally:
            self._inside, self.param_groups = None, groups

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_optimizer, (self._plain_class,), cast(Any, self).__getstate__()


def rebuild_optimizer(cls: type[Optimizer]) -> Any:
    made = wrapped_class("Local", LocalOptimizer, cls)
    return made.__new__(made)


rebuild_optimizer.__module__ = "fsdp2._pickles"  # pickles stay valid if this file moves


def check_groups(cls: type[Optimizer], groups: Groups) -> None:
    for group in groups:
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise UnsupportedError(
                    "FS703",
                    f"fsdp2.optim.local({cls.__name__}): a param group has {flag}=True, which "
                    f"steps on local shards do not support. Use {cls.__name__} itself on the "
                    "DTensors.",
                )


def _laid_like(tensor: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with its parameter's strides: fused kernels iterate over raw memory."""
    if grad.stride() == tensor.stride():  # functional_call may change strides
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)


def _has_parts(value: Any) -> bool:
    """Return True for a DTensor over a plain tensor, which can be resharded."""
    return isinstance(value, DTensor) and type(torch_dtensor.local_tensor(value)) is Tensor


def _name_of(param: Tensor) -> str:
    owner = OwnerMark.owner_of(param)
    return "a parameter" if owner is None else owner.fqn


def _never(tensor: Tensor) -> int:
    return 0


def _granule(is_fused: bool, tensor: Tensor) -> int:
    """Return the alignment at which a run may continue with exact results. See ``Granule``."""
    # Device kernels compute every element in the same way. CPU kernels have a vector loop and a
    # scalar tail, which round differently in fused kernels and for half precision.
    if tensor.device.type != "cpu":
        return 1 if tensor.is_floating_point() else 0
    if tensor.dtype not in (torch.float32, torch.float64):
        return 0
    return CACHE_LINE_NBYTES if is_fused else 1  # a fused kernel's chunks are cache-line aligned
