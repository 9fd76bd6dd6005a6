"""What a user chooses: policies (frozen, for good) and settings (frozen, replaced at run time).

[Note: torch's policies]
Each policy is a subclass of torch's class of that name, and ``ours`` makes one of torch's by its
fields: software that imports torch's names asks ``isinstance``, and passes what it made of them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch.distributed.tensor import Placement

from fsdp2._core.base import torch_modules
from fsdp2._core.base.arguments import wrong_type
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import ConfigError

# What a unit shards, and so what stays whole on each rank: values, which the engine reads.


@dataclass(frozen=True)
class Sharding:
    """What is divided over ranks. Optimizer states always are: between steps users see shards.

    ``name`` is what the user wrote. ``keeps_whole``: parameters stay whole from the first forward
    after an optimizer step to the backward that the next one follows. ``scatters_always``: a
    backward without gradient sync reduces over the first axis all the same, so that no whole
    gradient stays. What it puts off is the reduction over the second one.
    """

    name: str
    keeps_whole: bool = False
    scatters_always: bool = False

    def sync(self, is_on: bool) -> dict[str, bool]:
        """Return the settings that gradient sync stands for."""
        return {"reduce_grads": is_on or self.scatters_always, "all_reduce_grads": is_on}


PARAMETERS = Sharding('shard="parameters"')

SHARDINGS = {
    "parameters": PARAMETERS,
    "gradients": Sharding('shard="gradients"', keeps_whole=True, scatters_always=True),
    "optimizer": Sharding('shard="optimizer"', keeps_whole=True),
}

OUTER = {
    None: PARAMETERS,
    "optimizer": Sharding('shard_outer="optimizer"', scatters_always=True),
}
"""What may be said of the outer dim of a mesh; None: it replicates."""


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLAGS = (
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "keep_low_precision_grads",
    "full_precision_in_eval",
)


def _require(is_fine: bool, policy: object, name: str, expected: str) -> None:
    if not is_fine:
        raise wrong_type(type(policy).__name__, name, expected, getattr(policy, name))


class _Frozen:
    """Sets each field once. Torch's classes are not frozen, so dataclasses on them cannot be."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_modules.MixedPrecisionPolicy):
    """Choose dtypes for compute, reduction and outputs of a unit.

    Args:
        param_dtype: dtype of the whole floating-point parameters, and so of the compute and of the
            all-gather. ``None`` keeps the dtype of each parameter. The shards, and with them the
            optimizer, always keep their own dtype.
        reduce_dtype: dtype in which gradients are reduced, and added up while gradient sync is off.
            ``None`` follows each parameter: its ``grad_dtype``, if that was set before the first
            forward, else its own dtype. (A ``grad_dtype`` of None takes the dtype that backward
            computes.) It does not follow ``param_dtype``, as it does in torch up to 2.14: name that
            dtype here to have it so. A group with several dtypes reduces in one that holds them all
            (``torch.promote_types``), and stores each gradient in its own.
        output_dtype: dtype to which floating-point outputs of the forward are cast.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``, also
            inside lists, tuples, named tuples, dicts and dataclasses.
        cast_root_forward_inputs: cast them at the root, whatever ``cast_forward_inputs`` says.
        buffer_dtype: dtype in which floating-point buffers of the unit are registered. A state dict
            has them in their own dtype, and with the values that they had, unless somebody wrote to
            them since. Loading fills them again.
        keep_low_precision_grads: leave sharded gradients in the dtype that they were reduced in,
            not in that of their parameter. The optimizer must take such gradients.
        full_precision_in_eval: do not cast parameters, inputs and buffers while every module of the
            unit is in evaluation mode. ``train()`` and ``eval()`` then switch the unit.
        param_dtype_override_fn: called once with each parameter, by ``fully_shard``. ``None`` or
            ``param_dtype`` changes nothing. The parameter's own dtype keeps the parameter in that
            dtype. Nothing else may be returned, and every rank returns the same. Inputs are cast to
            ``param_dtype`` in any case.
        gather_dtype: an 8-bit float (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``) in which
            matrices travel in all-gathers, with scales. Whole ones are in ``param_dtype`` as ever,
            rounded to what the codes hold (3 or 2 bits behind the point). Shards, gradients,
            optimizers and checkpoints do not change. Vectors and scalars, in which precision
            counts and bytes do not, and parameters that keep their own dtype travel in that.
        gather_scale: ``"row"``, a scale for each row of a rank's shard, or ``"tensor"``, one for
            all of it. Scales are powers of two, of 2 bytes, and travel behind the codes: they need
            no collective of their own.

    The last seven are keywords. Of these, torch's class has ``param_dtype_override_fn`` only.

    Integer, boolean, complex and 8-bit float parameters are never cast. A group with complex
    gradients reduces in a complex dtype at least as wide as ``reduce_dtype``.

    Raises:
        ConfigError: a dtype that is not of floating-point numbers; a flag that is not a bool; a
            ``param_dtype_override_fn`` that cannot be called; another ``gather_dtype`` or
            ``gather_scale``.

    Source: the meaning of the same class in ``torch.distributed.fsdp``, torch 2.15; four of the
    other keywords are those of FSDP1's ``MixedPrecision`` and its ``FSDP_USE_FULL_PREC_IN_EVAL``.
    Gathers of quantised weights follow ZeRO++ (arXiv 2306.10209) in their purpose.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )  # the first of the keywords, as where torch's class has it
    cast_root_forward_inputs: bool = field(default=False, kw_only=True)
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True)
    keep_low_precision_grads: bool = field(default=False, kw_only=True)
    full_precision_in_eval: bool = field(default=False, kw_only=True)
    gather_dtype: torch.dtype | None = field(default=None, kw_only=True)
    gather_scale: str = field(default="row", kw_only=True)

    def __post_init__(self) -> None:
        for name in _DTYPES:
            dtype = getattr(self, name)
            is_one = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            _require(dtype is None or is_one, self, name, "a floating-point dtype or None")
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), self, name, "a bool")
        choose = self.param_dtype_override_fn
        expected = "a function of a parameter or None"
        _require(choose is None or callable(choose), self, "param_dtype_override_fn", expected)
        expected = "torch.float8_e4m3fn, torch.float8_e5m2 or None"
        dtype = self.gather_dtype
        is_code = isinstance(dtype, torch.dtype) and dtype in _CODES
        _require(dtype is None or is_code, self, "gather_dtype", expected)
        is_known = isinstance(self.gather_scale, str) and self.gather_scale in ("row", "tensor")
        _require(is_known, self, "gather_scale", "'row' or 'tensor'")


def keeps_dtype(policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str) -> bool:
    """Ask the user whether a parameter is computed in its own dtype, whatever the others are.

    Raises:
        ConfigError: the answer is another dtype, or none at all.
    """
    if policy.param_dtype_override_fn is None:
        return False
    chosen = policy.param_dtype_override_fn(param)
    if chosen is not None and chosen not in (policy.param_dtype, param.dtype):
        raise ConfigError(
            "FS213",
            f"fully_shard: param_dtype_override_fn returned {chosen!r} for {fqn}. Return None, "
            f"param_dtype ({policy.param_dtype}) or the parameter's own dtype ({param.dtype}).",
        )
    return chosen is not None and chosen is not policy.param_dtype


@dataclass(unsafe_hash=True)
class OffloadPolicy(_Frozen, torch_modules.OffloadPolicy):
    """Keep shards on the device of the mesh: no offloading. It has no arguments.

    Source: the meaning of the same class in ``torch.distributed.fsdp``.
    """


@dataclass(unsafe_hash=True)
class CPUOffloadPolicy(OffloadPolicy, torch_modules.CPUOffloadPolicy):
    """Keep shards, their gradients and so the optimizer's state in CPU memory.

    A group's shards are copied to the device before each all-gather; those of the next unit while
    this one computes. Its gradients are copied back after each reduction, before backward returns.
    On a CPU mesh nothing is copied.

    Args:
        pin_memory: keep them in pinned memory, where there is an accelerator, so that copies run
            while the device computes.

    Raises:
        ConfigError: ``pin_memory`` is not a bool.

    Source: the meaning of the same class in ``torch.distributed.fsdp``.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _require(isinstance(self.pin_memory, bool), self, "pin_memory", "a bool")


@dataclass(frozen=True)
class Residence:
    """Where a group computes, and where it keeps its shards and sharded gradients."""

    compute: torch.device
    offload: OffloadPolicy

    @cached_property
    def is_away(self) -> bool:
        """True if shards are copied to the device before they are sent."""
        return isinstance(self.offload, CPUOffloadPolicy) and not capabilities(self.compute).is_host

    @cached_property
    def storage(self) -> torch.device:
        return torch.device("cpu") if self.is_away else self.compute

    @cached_property
    def is_pinned(self) -> bool:
        """True if that is pinned host memory, which a device copies beside the compute."""
        pins = isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory
        return self.is_away and pins and capabilities(self.compute).pins


@dataclass(unsafe_hash=True)
class DataParallelMeshDims(_Frozen, torch_modules.DataParallelMeshDims):
    """Name the dims of a full mesh that data parallelism uses: ``fully_shard(dp_mesh_dims=...)``.

    Args:
        shard: the dim, or dims, over which parameters are sharded; several act as one, flattened.
        replicate: the dim, or dims, over which they are replicated. Without ``shard`` this is plain
            data parallelism (DDP).

    Raises:
        ConfigError: a name that is not a string; no dim at all; a dim that is in both.

    Source: the meaning of the same class in ``torch.distributed.fsdp``.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        expected = "the name of a dim, a tuple of names or None"
        for name in ("shard", "replicate"):
            names = getattr(self, name)
            is_several = isinstance(names, tuple | list) and all(isinstance(n, str) for n in names)
            _require(names is None or isinstance(names, str) or is_several, self, name, expected)
        if not self.shard_names and not self.replicate_names:
            raise ConfigError(
                "FS217",
                "DataParallelMeshDims: found neither shard nor replicate dims. Name at least one.",
            )
        both = set(self.shard_names) & set(self.replicate_names)
        if both:
            raise ConfigError(
                "FS217", f"DataParallelMeshDims: found {sorted(both)} in both shard and replicate."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


_OF_TORCH: tuple[tuple[type, Callable[..., Any]], ...] = (
    (torch_modules.MixedPrecisionPolicy, MixedPrecisionPolicy),
    (torch_modules.CPUOffloadPolicy, CPUOffloadPolicy),  # before its base
    (torch_modules.OffloadPolicy, OffloadPolicy),
    (torch_modules.DataParallelMeshDims, DataParallelMeshDims),
)


def ours(policy: Any) -> Any:
    """Return our policy for one of torch's, by its fields; anything else as it is.

    Raises:
        ConfigError: it says something that no field of ours does.
    """
    if isinstance(policy, MixedPrecisionPolicy | OffloadPolicy | DataParallelMeshDims):
        return policy
    for theirs, make in _OF_TORCH:
        if not isinstance(policy, theirs):
            continue
        known = {one.name for one in dataclasses.fields(make)}  # type: ignore[arg-type]  # a class
        said = {one: getattr(policy, one.name) for one in dataclasses.fields(policy)}  # type: ignore[arg-type]  # torch's are dataclasses
        for one, value in said.items():
            if one.name not in known and value != one.default:
                raise ConfigError(
                    "FS214",
                    f"fully_shard: found {one.name}={value!r} in a {type(policy).__name__}, which "
                    "fsdp2 does not know. Leave it at its default.",
                )
        return make(**{one.name: value for one, value in said.items() if one.name in known})
    return policy


@dataclass(frozen=True)
class Whole:
    """Let one rank have a parameter whole: what ``shard_placement_fn`` may return.

    The parameter lies on its *owner*, one rank of the axis to shard over, and the shards of the
    others are empty. So an optimizer of whole matrices (``fsdp2.optim.whole``) sends nothing for
    it. Owners are chosen so that ranks have like amounts of bytes and of a matrix optimizer's
    FLOPs, over all calls on the same ranks; each call goes on where the one before it left off.
    Forward and backward see the same parameter as ever, under the same name. A scalar, or one
    without elements, is laid out as without this. Needs torch 2.12 or later.

    ``fully_shard`` raises ``ConfigError`` for an owner that the axis does not have, and for an int
    of ``reshard_after_forward`` beside it; ``fsdp2.compile``, custom collectives and communication
    hooks refuse such a parameter by name.

    Args:
        owner: the place of the owner on the axis to shard over. ``None``: it is chosen.

    Source: ours; torch has no such placement.
    """

    owner: int | None = None


@dataclass(frozen=True)
class Aligned:
    """Divide a parameter between blocks only: what ``shard_placement_fn`` may return.

    Quantised weights and 8-bit optimizer states have a scale for each block of elements, and a
    shard that cuts a block computes other ones than the whole parameter has. Here the rows of a
    rank, along ``dim``, begin at a multiple of ``multiple_of``, and only the last block of all may
    have fewer. Ranks have the same number of blocks, and those that are left over go one by one to
    the ranks that have the fewest bytes so far, over all calls on the same ranks. What does not
    divide evenly lies unevenly, and travels so: nothing is padded to the largest shard.

    Where ``torch.chunk`` divides no block, this is ``Shard(dim)``. Else the parameter is laid out
    as one of ``Whole`` is, with the same limits: it needs torch 2.12 or later; ``fsdp2.compile``,
    custom collectives, communication hooks and an int of ``reshard_after_forward`` refuse it by
    name; so does tensor parallelism on the same ``dim``.

    Args:
        dim: the dim to shard, as in ``Shard``. ``None``: blocks are of elements of the flattened
            parameter, as most optimizers with 8-bit states have them. It is sharded by rows (dim
            0) then, as many of them as make up whole blocks.
        multiple_of: rows of a block, or elements.
        at_least: a rank has as many as this, or none: the short block at the end lies with the one
            before it. Optimizers with 8-bit states keep those of small tensors in fp32.

    Raises:
        ConfigError: a dim that is no int; ``multiple_of`` or ``at_least`` that is no int of at
            least 1.

    Source: ours. RaggedShard of veScale (arXiv 2602.22437) divides between blocks, too.
    """

    dim: int | None
    multiple_of: int = 128
    at_least: int = 1

    def __post_init__(self) -> None:
        is_dim = self.dim is None or type(self.dim) is int
        _require(is_dim, self, "dim", "an int, or None for elements of the flattened parameter")
        for name in ("multiple_of", "at_least"):
            count = getattr(self, name)
            _require(type(count) is int and count > 0, self, name, "an int of at least 1")


@dataclass(frozen=True)
class ShardPlacementResult:
    """Say where one parameter goes: what ``shard_placement_fn`` may return.

    Parameters of one call that lie on different meshes are gathered and reduced apart: each over
    the ranks of its own mesh, and its gradient is the mean over these.

    Args:
        placement: ``Shard(dim)``, ``Replicate()``, ``Whole()``, ``Aligned(dim)``, or ``None`` for
            ``Shard(0)``.
        mesh_info: a 1-D mesh (shard), a 2-D mesh (replicate, shard), or an object whose ``mesh`` is
            one and whose ``shard_mesh_dim`` and ``replicate_mesh_dim`` say which dim is which.
            ``None``: the mesh of the call.

    Source: the meaning of the class of this name inside torch's ``fully_shard``.
    """

    placement: Placement | Whole | Aligned | None
    mesh_info: Any = None


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Overlap:
    """How much runs beside the compute, and so how much is in memory at a time.

    Args:
        prefetch: units that are gathered ahead of the one that computes.
        reductions: reductions that run on while compute goes on. With 0 each is waited for at once.
        keeps_parts: keep the large parts of a root from forward to backward, read or not.
        synchronizes: on a device, let the host wait at the end of each backward, so that a root's
            parts can be reduced early there too. On a CPU they always are.
    """

    prefetch: int = 1
    reductions: int = 1
    keeps_parts: bool = False
    synchronizes: bool = False


@dataclass(frozen=True)
class Settings:
    """Run-time settings of one unit; ``FSDPModule.set_*`` replace it as a whole.

    ``reshard_after_forward`` is what the user said: ``None`` (True below the root, False at the
    root), a bool, or the number of ranks to reshard to. ``sharding`` is what is divided at all.
    ``keeps_in_evaluation``: what a forward without gradients gathered serves the next one. The sum
    of gradients is divided by ``divide_by`` (None: by the number of ranks). ``manual_finalization``
    is the root's: backwards of the tree end by ``finalize_backward``. ``input_buffers`` reductions
    may hold their inputs at a time (None: as many as ``overlap`` says). The prefetch lists are of
    units; None: by the order of last time.
    """

    reshard_after_forward: bool | int | None = None
    sharding: Sharding = PARAMETERS  # frozen
    keeps_in_evaluation: bool = False
    reshard_after_backward: bool = True
    keep_unsharded_storage: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    is_last_backward: bool = True
    manual_finalization: bool = False
    unshard_in_backward: bool = True
    divide_by: float | None = None
    only_sums: bool = False
    reduce_unused: bool = False
    input_buffers: int | None = None
    overlap: Overlap = Overlap()  # frozen
    forward_prefetch: tuple[Any, ...] | None = None
    backward_prefetch: tuple[Any, ...] | None = None

    @cached_property
    def accumulates(self) -> bool:
        """True if a backward without gradient sync says that others follow before a step."""
        return not (self.reduce_grads and self.all_reduce_grads)
