"""Optimizers that step on local shards, flat where they can, and never enter DTensor dispatch.

Owns ``local``, the classes that it knows to be element-wise, and the swap of parameters and state
around a step. Which parameters step as one tensor is decided in ``_runs``.
"""

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
from fsdp2._core.base.arguments import (
    check_flag,
    check_function,
    check_mapping,
    translated,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.errors import ConfigError, FSDPError, UnsupportedError
from fsdp2._core.comm.process_mesh import carrying, named
from fsdp2._core.params.param import OwnerMark
from fsdp2.optim._blocks import Probe, StatesInBlocks, is_apart, is_tensor
from fsdp2.optim._runs import Granule, Run, State, StepPlan, Table
from fsdp2.optim._zero import zero_gradients

# One call of torch's fused Adam kernel for all runs of a param group, with one step counter.

VARIANTS = (torch.optim.Adam, torch.optim.AdamW)
"""The classes whose fused step is this kernel."""


class FusedAdam:
    """What the kernel takes for the runs of one plan, except gradients and hyperparameters."""

    def __init__(self, runs: Sequence[Run], uses_amsgrad: bool) -> None:
        self._runs = runs
        self._params = [run.tensor for run in runs]
        self._means = [run.state["exp_avg"] for run in runs]
        self._squares = [run.state["exp_avg_sq"] for run in runs]
        self._maxima = [run.state["max_exp_avg_sq"] for run in runs] if uses_amsgrad else []
        self._uses_amsgrad = uses_amsgrad
        self._counter = runs[0].state["step"].clone()
        self._counters = [self._counter] * len(runs)

    @staticmethod
    def of(plan: StepPlan, group: dict[str, Any]) -> FusedAdam | None:
        """Return what steps the plan's runs in one call; None if they have to step by the class."""
        if not _suits(group) or plan.plain or not plan.runs:
            return None
        names = {"step", "exp_avg", "exp_avg_sq"}
        if group["amsgrad"]:
            names.add("max_exp_avg_sq")
        first = plan.runs[0].tensor
        for run in plan.runs:
            if set(run.state) != names or not first.is_floating_point():
                return None
            values = [run.tensor, *(run.state[name] for name in names - {"step"})]
            if any(v.dtype is not first.dtype or v.device != first.device for v in values):
                return None
            step = run.state["step"]
            if step.dim() or step.dtype is not torch.float32 or step.device != first.device:
                return None
        steps = torch.stack([run.state["step"] for run in plan.runs])
        if not bool((steps == steps[0]).all()):
            return None
        return FusedAdam(plan.runs, bool(group["amsgrad"]))

    def takes(self, grads: Sequence[Tensor], group: dict[str, Any]) -> bool:
        """True if this step is one for the kernel: what ``of`` asked still holds."""
        if not _suits(group) or bool(group["amsgrad"]) is not self._uses_amsgrad:
            return False
        dtype = self._params[0].dtype
        return all(grad.dtype is dtype for grad in grads)

    def step(self, grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        self._counter += 1
        kernel = (
            torch_tensors.fused_adamw
            if group["decoupled_weight_decay"]
            else torch_tensors.fused_adam
        )
        kernel(
            self._params,
            grads,
            self._means,
            self._squares,
            self._maxima,
            self._counters,
            amsgrad=self._uses_amsgrad,
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
        """Give every run a counter of its own again."""
        for run in self._runs:
            run.state["step"].copy_(self._counter)


def _suits(group: dict[str, Any]) -> bool:
    """True if hyperparameters are what the kernel takes as they are."""
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
"""What one element becomes depends on that element's parameter, gradient and state alone."""

MIXING: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    torch.optim.Muon,
)
"""What one element becomes depends on others, or on the loss: nobody can vouch for these."""

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States of these classes that are 0-dim whatever the parameter is."""

CACHE_LINE_NBYTES = 64
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Groups = list[dict[str, Any]]
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def local(
    cls: type[OptimizerT],
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
    *,
    elementwise: bool = False,
    **kwargs: Any,
) -> OptimizerT:
    """Make an optimizer of class ``cls`` whose steps run on local shards.

    It is an instance of ``cls``, with its arguments, param groups, hooks and state, so learning
    rate schedulers, ``GradScaler`` and checkpoints take it as they take the plain optimizer.
    Parameters of one param group that are neighbours in their unit's flat buffer step as one tensor
    (with a number of their own each, where their ``step`` differs); others step each on its local
    tensor. Parameters, gradients and states stay DTensors to whoever looks: ``state`` and
    ``state_dict()`` give views of what the steps write, placed as the parameters are, and copies of
    0-dim states such as ``step``, which are up to date when ``state`` is read. A state changed
    through ``state`` is taken over by the next step.

    Results are bit for bit those of ``cls`` on the DTensors with the same arguments (of a class
    of your own on a CPU, as far as its kernels round alike wherever an element lies). Where
    ``foreach`` is None that means the loop, which torch chooses for DTensors. Where torch has
    no ``DTensor`` kernels (fused SGD and Adagrad, Rprop), they are those on plain local tensors.

    Args:
        cls: SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD or Rprop of
            ``torch.optim``; any other class only with ``elementwise=True``.
        params: as ``cls`` takes them; sharded, tensor-parallel and plain parameters of any dtype.
        elementwise: vouch for a class of your own, or of another library. It must compute each
            element from that element's parameter, gradient and states alone, and keep nothing
            about parameters between steps but its states. Its first step runs parameter by
            parameter; if it keeps states in the parameter's shape or 0-dim, and in plain tensors,
            neighbours step as one from then on. Other states (codes and scales of the blocks of
            an 8-bit optimizer) are those of the whole parameter if no shard divides a block, by
            ``fsdp2.Aligned(None, multiple_of=256, at_least=4096)``; to say what they are, the
            class steps once on zeros of a shard's shape. Where a shard divides a block they belong
            to this rank's shards: ``state_dict()`` refuses them, and ``local_state_dict()`` or
            ``fsdp2.checkpoint.local_state`` is how to save them.
        kwargs: the arguments of ``cls``.

    Raises:
        ConfigError: a class that is not known to be element-wise, or known not to be; what a class
            of ``torch.optim`` refuses.
        UnsupportedError: ``capturable=True`` or ``differentiable=True``; a class whose ``step``
            must be given a closure, because it computes the loss in the middle of a step.

    Source: the optimizers of ``torch.optim``; only where their values lie is our choice.
    """
    who = "fsdp2.optim.local"
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise wrong_type(who, "cls", "a subclass of torch.optim.Optimizer", cls)
    check_flag(who, "elementwise", elementwise)
    _check_class(cls, elementwise)
    try:
        optimizer: OptimizerT = _local_class(cls)(params, **kwargs)
        check_groups(cls, optimizer.param_groups)
    except FSDPError:
        raise
    except Exception as error:
        if cls not in ELEMENTWISE:  # a class of the user's says what it likes
            raise
        raise translated(f"{who}: {cls.__name__} refused its arguments", error) from error
    return optimizer


def _check_class(cls: type[Optimizer], is_vouched_for: bool) -> None:
    """Refuse a class that would compute something else on shards."""
    if cls in ELEMENTWISE:
        return
    if not is_vouched_for or cls in MIXING:
        known = ", ".join(c.__name__ for c in ELEMENTWISE)
        way = (
            "no elementwise=True changes that."
            if cls in MIXING
            else "or, for a class that is element-wise, pass elementwise=True."
        )
        raise ConfigError(
            "FS702",
            f"fsdp2.optim.local: {cls.__name__} is not known to be element-wise, and on local "
            f"shards only element-wise optimizers compute what they compute on whole parameters. "
            f"Use one of {known}; fsdp2.optim.whole, if {cls.__name__} steps each parameter by "
            f"itself; {cls.__name__} itself on the DTensors; {way}",
        )
    if needs_closure(cls):
        raise UnsupportedError(
            "FS703",
            f"fsdp2.optim.local: {cls.__name__}.step must be given a closure, so it computes the "
            "loss in the middle of a step, and a step on local shards takes gradients that are "
            f"there before it. Use {cls.__name__} itself on the DTensors.",
        )


def needs_closure(cls: type[Optimizer]) -> bool:
    """True if ``cls.step`` must be given a closure, and so computes the loss in its middle."""
    closure = [*inspect.signature(cls.step).parameters.values()][1:2]
    return bool(
        closure and closure[0].default is closure[0].empty and closure[0].kind in POSITIONAL
    )


def plain_step(cls: type[Optimizer]) -> Any:
    """Return the class's own ``step``, without the hooks that torch runs around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class LocalOptimizer:
    """What ``local`` puts in front of an optimizer class.

    The state has two forms. Between the first step and the next look at ``state``, plans hold it;
    after a look the table, by parameter, holds it, until the next step makes plans of it.
    """

    _plain_class: type[Optimizer]
    _table: Table
    _plans: list[StepPlan] | None
    _kernels: list[FusedAdam]
    _inside: Table | None
    _known: set[int]
    _joins: bool
    param_groups: Groups

    def __new__(cls, *args: Any, **kwargs: Any) -> LocalOptimizer:
        self = object.__new__(cls)
        self._table = defaultdict(dict)
        self._plans = self._inside = None
        self._kernels = []
        self._known = set()
        # [Note: states of classes that were vouched for]
        # Neighbours step as one once a step has shown that states can be told apart again.
        self._joins = self._plain_class in ELEMENTWISE
        return self

    @property
    def state(self) -> Table:
        """States by parameter. Inside a step: by local tensor."""
        if self._inside is not None:
            return self._inside
        if self._plans is not None:
            self._publish()
        return self._table

    @state.setter
    def state(self, table: Table) -> None:
        self._table, self._plans, self._kernels = table, None, []
        if not isinstance(table, defaultdict):
            self._table = defaultdict(dict, table)
        self._place_scalars()

    def _place_scalars(self) -> None:
        """Place states of 0-dim parameters as these are: torch's checkpoints bring them plain.

        What has a counter's shape is no counter if it is a state of a known class that is none, or
        has the shape of another parameter. Counters are plain, whatever brought them.
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
                if not isinstance(value, Tensor) or value.dim():
                    continue
                is_counter = key in COUNTERS if is_known else key not in shaped
                if isinstance(value, DTensor):
                    if is_known and is_counter:
                        entry[key] = value.to_local()
                elif not is_counter:
                    entry[key] = DTensor.from_local(
                        value, param.device_mesh, param.placements, run_check=False
                    )

    def _publish(self) -> None:
        """Let the table hold the state."""
        self._settle()
        plans, self._plans = self._plans, None
        known = len(self._table)
        with torch.no_grad():
            for plan in plans or ():
                plan.publish(self._table)
                self._known |= plan.storages()
        if len(self._table) != known:  # in the order of parameters, not of runs
            order = [p for group in self.param_groups for p in group["params"] if p in self._table]
            ordered = {param: self._table[param] for param in order}
            self._table = defaultdict(dict, {**ordered, **self._table})

    def _settle(self) -> None:
        """Let the runs hold all of their state."""
        kernels, self._kernels = self._kernels, []
        with torch.no_grad():
            for kernel in kernels:
                kernel.settle()

    @torch_compiler.always_eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step. ``closure`` computes the loss again, with gradients; its result is returned.

        Raises:
            UnsupportedError: a param group asks for ``capturable`` or ``differentiable``.
        """
        loss = None
        check_function("step", "closure", closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
            if not self._joins and all(plan.has_parts() for plan in plans):
                self._joins = True
                self._publish()  # the next step plans anew
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what the plain optimizer's ``state_dict`` returns, with DTensors.

        States in blocks are the plain tensors that they are made of, each of the whole parameter.
        See [Note: states in blocks] in ``_blocks``.

        Raises:
            UnsupportedError: a state belongs to this rank's shards and says nothing on others.
        """
        state = self.local_state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            entry = self.state.get(param)
            if not entry or not isinstance(param, DTensor) or param.device_mesh.size() == 1:
                continue
            if is_apart(entry, param):  # it was loaded, and there was no step
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
                    f"fsdp2.optim.local({self._plain_class.__name__}).state_dict: "
                    f"{', '.join(odd)} are neither in the parameter's shape nor numbers. They "
                    f"belong to this rank's shard, "
                    f"{tuple(torch_dtensor.local_tensor(param).shape)}, and a whole or a sharded "
                    "checkpoint would give them to other ranks. Save "
                    "fsdp2.checkpoint.local_state(model, optimizer) on each rank.",
                )
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Do what the plain optimizer's ``load_state_dict`` does, also with states in blocks.

        These keep their dtypes: classes cast what they load to that of the parameter.
        """
        given = check_mapping("load_state_dict", "state_dict", state_dict)
        groups, values = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list | tuple) or not isinstance(values, Mapping):
            expected = "a dict with 'param_groups', a list, and 'state', a dict"
            raise wrong_value("load_state_dict", "state_dict", expected, given)
        ids = itertools.chain(*(group["params"] for group in groups))
        own = itertools.chain(*(group["params"] for group in self.param_groups))
        reduced, in_blocks = dict(values), dict[Tensor, State]()
        for key, param in zip(ids, own, strict=False):  # the class says what does not fit
            entry = reduced.get(key)
            if isinstance(entry, dict) and is_apart(entry, param):
                in_blocks[param] = {k: v for k, v in entry.items() if is_tensor(v)}
                reduced[key] = {k: v for k, v in entry.items() if not is_tensor(v)}
        load = cast(Any, super()).load_state_dict
        load({**state_dict, "state": reduced}, *args, **kwargs)
        for param, parts in in_blocks.items():
            self._table[param].update(parts)

    def _block_state_room(self, param: Tensor, key: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return room for a part of a state in blocks that is loaded; None: it is another one."""
        if self._plain_class in ELEMENTWISE or not isinstance(param, DTensor):
            return None
        if param.device_mesh.size() == 1 or (shape == tuple(param.shape) and "." not in key):
            return None
        blocks = self._blocks_of(param)
        if blocks is None or key not in blocks.parts:
            return None
        room = blocks.placed(key, None)
        if tuple(room.shape) != shape:
            raise UnsupportedError(
                "FS704",
                f"{_name_of(param)}: found {key} of shape {shape} where the shards of this model "
                f"have {tuple(room.shape)} together. Save and load where no shard divides a block "
                "of the optimizer's states, by shard_placement_fn: fsdp2.Aligned.",
            )
        return room

    def _blocks_of(self, param: DTensor) -> StatesInBlocks | None:
        """Return what the class keeps in blocks for a parameter; None: nothing, as far as it says.

        It says nothing while it refuses to step, as schedulefree's classes do in evaluation.
        """
        if self._plain_class in ELEMENTWISE:
            return None
        name = f"fsdp2.optim.local({self._plain_class.__name__}): {_name_of(param)}"
        try:
            return StatesInBlocks.of(name, param, self._probe_for(param))
        except FSDPError:
            raise
        except Exception:  # of the class's step, whatever it raises
            return None

    def _probe_for(self, param: Tensor) -> Probe:
        """Return what makes states of a shape as the class makes them for a parameter."""
        groups = self.param_groups
        index = next(i for i, g in enumerate(groups) if any(p is param for p in g["params"]))

        def probe(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> State:
            leaf = torch.zeros(tuple(shape), dtype=dtype, device=device)
            leaf.grad = torch.zeros_like(leaf)
            own = [{**group, "params": []} for group in groups]
            own[index]["params"] = [leaf]
            inside: Table = defaultdict(dict)
            step = plain_step(self._plain_class)
            self._inside, self.param_groups = inside, own
            try:
                # what asks for states is no step: random numbers go on as they were
                with (
                    torch.random.fork_rng(_indices(device), device_type=_kind(device)),
                    torch.compiler.set_stance("force_eager"),
                    torch.no_grad(),
                ):
                    step(self)
            finally:
                self._inside, self.param_groups = None, groups
            return inside[leaf]

        return probe

    def local_state_dict(self) -> dict[str, Any]:
        """Return ``state_dict()`` with what is this rank's own, which loads on this rank only."""
        return cast(Any, super()).state_dict()  # type: ignore[no-any-return]  # of the class

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set them to None, or to zero where they lie."""
        if set_to_none is True:
            cast(Any, super()).zero_grad(True)
        else:
            zero_gradients(self.param_groups, set_to_none)

    def _step_with(self, plans: list[StepPlan], groups: Groups, grads: list[Tensor]) -> None:
        """Run the class's own step on local tensors that have these gradients."""
        targets = [t for plan in plans for t in plan.targets[: len(plan.runs)]]
        try:
            for target, grad in zip(targets, grads, strict=True):
                if target.grad_dtype is not grad.dtype:  # the user chose one for the parameter
                    target.grad_dtype = grad.dtype
                target.grad = grad
            self._step_inside(plans, groups)
        finally:
            for target in targets:  # [Note: reused gradients]
                target.grad = None

    def _step_fused(self, plans: list[StepPlan], groups: Groups, grads: list[Tensor]) -> bool:
        """Step by one kernel call a param group, if the class would do the same; or return False.

        ``GradScaler`` hands a fused optimizer ``grad_scale`` and ``found_inf``, as attributes.
        """
        if self._plain_class not in VARIANTS or not all(group["fused"] for group in groups):
            return False
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if not scaled and not self._kernels:
            pairs = zip(plans, groups, strict=True)
            kernels = [FusedAdam.of(plan, group) for plan, group in pairs]
            self._kernels = [kernel for kernel in kernels if kernel is not None]
            if len(self._kernels) < len(kernels):
                self._kernels = []  # they have not counted anything yet
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
        """Return plans and the gradient of each run; plan again if they do not hold any more."""
        if self._plans is not None and len(self._plans) == len(groups):
            grads: list[Tensor] = []
            for plan, group in zip(self._plans, groups, strict=True):
                own = plan.gradients(group["params"])
                if own is None:
                    break
                grads += own
            else:
                return self._plans, grads
        if self._plans is not None:
            self._publish()
        plans, grads = [], []
        self._place_states(groups)
        for group in groups:
            granule: Granule = functools.partial(_granule, bool(group.get("fused")))
            if not self._joins:  # [Note: states of classes that were vouched for]
                granule = _never
            plan = StepPlan(group["params"], self._table, granule, self._known)
            own = plan.gradients(group["params"])
            if own is None:  # gradients that must be redistributed
                plan = StepPlan(group["params"], self._table, _never, self._known)
                own = plan.loose_gradients()
            plans.append(plan)
            grads += own
        self._plans, self._known = plans, set()
        return plans, grads

    def _place_states(self, groups: Groups) -> None:
        """Place states as their parameters are, in an order that all ranks have: plans differ."""
        with named("step of an optimizer: a state placed otherwise"), carrying():
            for group in groups:
                for param in group["params"]:
                    if not isinstance(param, DTensor) or param not in self._table:
                        continue
                    if is_apart(self._table[param], param):
                        blocks = self._blocks_of(param)
                        if blocks is not None:
                            probe = self._probe_for(param)
                            self._table[param] = blocks.together(self._table[param], probe)
                            continue
                    torch_dealt.place_like(param, self._table[param])

    def _step_inside(self, plans: list[StepPlan], groups: Groups) -> None:
        """Run the class's own step with local tensors in the place of parameters."""
        inside: Table = defaultdict(dict)
        own_groups = []
        for plan, group in zip(plans, groups, strict=True):
            own = {**group, "params": plan.targets}
            if plan.runs and own.get("foreach", ...) is None and not own.get("fused"):
                own["foreach"] = False  # what torch chooses for DTensors
            own_groups.append(own)
            for run in plan.runs:
                inside[run.tensor] = run.state
            for param in plan.plain:
                inside[param] = self._table[param]
        step = plain_step(self._plain_class)
        self._inside, self.param_groups = inside, own_groups
        try:
            step(self)
        finally:
            self._inside, self.param_groups = None, groups
            for plan in plans:
                for run in plan.runs:
                    run.state = inside[run.tensor]
        for own, group in zip(own_groups, groups, strict=True):
            for key, value in own.items():
                if key not in ("params", "foreach") and group.get(key) is not value:
                    group[key] = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "state" in state:
            self.state = state.pop("state")
        cast(Any, super()).__setstate__(state)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_optimizer, (self._plain_class,), cast(Any, self).__getstate__()


_classes: dict[type[Optimizer], Any] = {}


def _local_class(cls: type[Optimizer]) -> Any:
    """Return the class that ``local`` makes instances of."""
    if cls not in _classes:
        names = {"_plain_class": cls, "__doc__": cls.__doc__, "__module__": __name__}
        _classes[cls] = type(f"Local{cls.__name__}", (LocalOptimizer, cls), names)
    return _classes[cls]


def rebuild_optimizer(cls: type[Optimizer]) -> Any:
    made = _local_class(cls)
    return made.__new__(made)


rebuild_optimizer.__module__ = "fsdp2._pickles"  # which finds it, wherever this file moves


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
    """Return a gradient with the strides of its parameter: fused kernels read memory in its order.

    Autograd gives leaves such gradients; one that came through ``functional_call`` may lie as it
    was computed.
    """
    if grad.stride() == tensor.stride():
        return grad
    return torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)


def _kind(device: torch.device) -> str:
    """Return the kind of device whose random numbers are kept; those of the host always are."""
    return "cuda" if device.type in ("cpu", "meta") else device.type


def _indices(device: torch.device) -> list[int]:
    if device.type in ("cpu", "meta"):
        return []
    return [torch.accelerator.current_device_index() if device.index is None else device.index]


def _has_parts(value: Any) -> bool:
    """True for a DTensor of plain numbers, which any rank can have a part of."""
    return isinstance(value, DTensor) and type(torch_dtensor.local_tensor(value)) is Tensor


def _name_of(param: Tensor) -> str:
    owner = OwnerMark.owner_of(param)
    return "a parameter" if owner is None else owner.fqn


def _never(tensor: Tensor) -> int:
    """Say that every parameter steps alone. See ``Granule``."""
    return 0


def _granule(is_fused: bool, tensor: Tensor) -> int:
    """Say behind which tensors a run may go on, so that results stay exact. See ``Granule``.

    Kernels on a device compute every element alike. Those on a CPU have a vector loop and a scalar
    tail, which round differently in the fused kernels, and for half precision. What a fused kernel
    gives to a thread starts on a cache line.
    """
    if tensor.device.type != "cpu":
        return 1 if tensor.is_floating_point() else 0
    if tensor.dtype not in (torch.float32, torch.float64):
        return 0
    return CACHE_LINE_NBYTES if is_fused else 1
