"""User-visible policies, which are constant, and settings, which are replaced at run time.

[Note: torch's policies]
Each policy is frozen, and subclasses torch's class of the same name, because other libraries check
``isinstance`` with torch's classes. ``ours`` converts instances of these classes field by field.

[Note: cast buffers]
A buffer that a policy casts is registered in low precision, and the original is kept. If the
registered buffer still equals the cast original, ``state_dict`` returns the original and
``load_state_dict`` writes to it. Otherwise a state dict contains the registered buffer, cast to the
original dtype. Version counters would miss changes: torch's batch norm does not increment them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from fsdp2._core.base import torch_modules
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import ConfigError, wrong_type


@dataclass(frozen=True)
class Sharding:
    """A choice of states to shard. Optimizer states, and parameters between steps, are always
    sharded. ``keeps_whole``: parameters stay unsharded from the first forward after an optimizer
    step until the last backward before the next step. ``scatters_always``: a backward without
    gradient sync still reduces over the first axis, but defers reduction over the second axis."""

    name: str
    keeps_whole: bool = False
    scatters_always: bool = False

    def sync(self, is_on: bool) -> dict[str, bool]:
        """Return the settings that turn gradient sync on or off."""
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
"""Valid values of ``shard_outer``. With None, the outer dim of the mesh only replicates."""

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
    """Makes fields write-once: a dataclass cannot be frozen if its base (torch's class) is not."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_modules.MixedPrecisionPolicy):
    """Choose the dtypes of a unit's compute, reduction and outputs.

    Args:
        param_dtype: dtype of the unsharded floating-point parameters, and therefore of the compute
            and the all-gather. ``None`` keeps each parameter's dtype. The shards, and therefore the
            optimizer's states, always keep the original dtype.
        reduce_dtype: dtype in which gradients are reduced, and accumulated while gradient sync is
            off. ``None`` uses each parameter's ``grad_dtype`` if that was set before the first
            forward, and the parameter's own dtype otherwise. (A ``grad_dtype`` of None uses the
            dtype that backward produces.) Unlike in torch up to 2.14, the default is not
            ``param_dtype``: pass that dtype explicitly. A group with several dtypes reduces in
            their common dtype (``torch.promote_types``), and stores each gradient in its own dtype.
        output_dtype: dtype to which floating-point outputs of the forward are cast.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``, including
            those inside lists, tuples, named tuples, dicts and dataclasses.
        cast_root_forward_inputs: cast inputs at the root, regardless of ``cast_forward_inputs``.
        buffer_dtype: dtype in which floating-point buffers of the unit are registered. A state dict
            contains buffers in their original dtype, with their original values unless they were
            modified. ``load_state_dict`` updates the registered buffers and the originals.
        keep_low_precision_grads: leave sharded gradients in the dtype of their reduction, instead
            of casting them to the parameter's dtype. The optimizer must accept such gradients.
        full_precision_in_eval: do not cast parameters, inputs and buffers while every module of the
            unit is in evaluation mode. ``train()`` and ``eval()`` then switch the unit's dtypes.
        param_dtype_override_fn: a function that ``fully_shard`` calls once for each parameter. It
            must return the parameter's own dtype to keep the parameter in that dtype, and ``None``
            or ``param_dtype`` otherwise, with equal results on all ranks. Inputs are always cast to
            ``param_dtype``.
        gather_dtype: an 8-bit float dtype (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``) in
            which all-gathers send matrices, along with scales. Unsharded matrices still have the
            dtype ``param_dtype``, but are rounded to the precision of the 8-bit dtype (3 or 2
            fractional bits). Shards, gradients, optimizers and checkpoints are not affected.
            Vectors and scalars, which are small but need precision, are not converted to 8 bits,
            nor are parameters that keep their own dtype.
        gather_scale: ``"row"`` for one scale per row of a rank's shard, ``"tensor"`` for one scale
            per shard. Scales are 2-byte powers of two, sent in the same collective as the matrices.

    The last seven are keyword-only; torch's class has only ``param_dtype_override_fn`` of them.
    Integer, boolean, complex and 8-bit float parameters are never cast. A group with complex
    gradients reduces in a complex dtype at least as wide as ``reduce_dtype``.

    Raises:
        ConfigError: a dtype is not floating-point; a flag is not a bool;
            ``param_dtype_override_fn`` is not callable; or ``gather_dtype`` or ``gather_scale`` is
            invalid.

    Source: the class of the same name in ``torch.distributed.fsdp``, torch 2.15. Keywords from
    ``cast_root_forward_inputs`` to ``full_precision_in_eval``: FSDP1's ``MixedPrecision`` and
    ``FSDP_USE_FULL_PREC_IN_EVAL``. Quantised all-gathers: ZeRO++ (arXiv 2306.10209).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )  # the first keyword-only argument, as in torch's class
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
        expected = "a function that takes a parameter, or None"
        _require(choose is None or callable(choose), self, "param_dtype_override_fn", expected)
        expected = "torch.float8_e4m3fn, torch.float8_e5m2 or None"
        dtype = self.gather_dtype
        is_code = isinstance(dtype, torch.dtype) and dtype in _CODES
        _require(dtype is None or is_code, self, "gather_dtype", expected)
        is_known = isinstance(self.gather_scale, str) and self.gather_scale in ("row", "tensor")
        _require(is_known, self, "gather_scale", "'row' or 'tensor'")


def keeps_dtype(policy: MixedPrecisionPolicy, param: nn.Parameter, fqn: str) -> bool:
    """Return whether the user's function keeps the parameter in its own dtype."""
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
    """Store shards on the device of the mesh, without offloading. It has no arguments.

    Source: the class of the same name in ``torch.distributed.fsdp``.
    """


@dataclass(unsafe_hash=True)
class CPUOffloadPolicy(OffloadPolicy, torch_modules.CPUOffloadPolicy):
    """Store shards, their gradients, and therefore the optimizer's states, in CPU memory.

    A group's shards are copied to the device before each all-gather, overlapping the compute of the
    preceding unit. The gradients are copied to the CPU after each reduction, before backward
    returns. On a CPU mesh, nothing is copied.

    Args:
        pin_memory: use pinned memory if there is an accelerator, so that copies overlap compute.

    Raises:
        ConfigError: ``pin_memory`` is not a bool.

    Source: the class of the same name in ``torch.distributed.fsdp``.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        _require(isinstance(self.pin_memory, bool), self, "pin_memory", "a bool")


@dataclass(frozen=True)
class Residence:
    compute: torch.device
    offload: OffloadPolicy

    @cached_property
    def is_away(self) -> bool:
        """Return True if shards are copied to the device before an all-gather sends them."""
        return isinstance(self.offload, CPUOffloadPolicy) and not capabilities(self.compute).is_host

    @cached_property
    def storage(self) -> torch.device:
        return torch.device("cpu") if self.is_away else self.compute

    @cached_property
    def is_pinned(self) -> bool:
        """Return True if shards are in pinned host memory, from which copies overlap compute."""
        pins = isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory
        return self.is_away and pins and capabilities(self.compute).pins


@dataclass(unsafe_hash=True)
class DataParallelMeshDims(_Frozen, torch_modules.DataParallelMeshDims):
    """Specify which dims of a full mesh are data-parallel: ``fully_shard(dp_mesh_dims=...)``.

    Args:
        shard: the dim or dims over which parameters are sharded. Several dims are flattened.
        replicate: the dim or dims over which parameters are replicated. ``replicate`` without
            ``shard`` is plain data parallelism (DDP).

    Raises:
        ConfigError: a name is not a string; both arguments are empty; or a dim is in both.

    Source: the class of the same name in ``torch.distributed.fsdp``.
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
    """Convert torch's policies to ours, field by field; return any other value unchanged."""
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
                    "fsdp2 does not support. Leave it at its default.",
                )
        return make(**{one.name: value for one, value in said.items() if one.name in known})
    return policy


@dataclass(frozen=True)
class Whole:
    """Place the full parameter on one rank. Return it from ``shard_placement_fn``.

    The parameter is stored on its *owner*, one rank of the shard axis; the shards of other ranks
    are empty. Optimizers that need full matrices (``fsdp2.optim.whole``) thus do not communicate
    the parameter. Owners are chosen to balance bytes and a matrix optimizer's FLOPs over ranks,
    across all ``fully_shard`` calls on the same ranks. Forward and backward use the parameter as
    usual, under the same name. ``Whole`` has no effect on scalars and empty parameters. Requires
    torch 2.12 or later.

    ``fully_shard`` raises ``ConfigError`` if the owner is not a rank of the shard axis, or if
    ``reshard_after_forward`` is an int. ``fsdp2.compile``, custom collectives and communication
    hooks raise an error that names the parameter.

    Args:
        owner: the owner's rank on the shard axis. If ``None``, ``fully_shard`` chooses the owner.

    Source: fsdp2; torch has no equivalent placement.
    """

    owner: int | None = None


@dataclass(frozen=True)
class Aligned:
    """Shard a parameter only at block boundaries. Return it from ``shard_placement_fn``.

    Quantised weights and 8-bit optimizer states have one scale per block of elements, and the
    scales differ from those of the full parameter if a shard splits a block. With ``Aligned``, each
    rank's rows along ``dim`` begin at a multiple of ``multiple_of``, and only the last block may be
    shorter. Each rank gets the same number of blocks. Any remaining blocks go one by one to the
    ranks with the fewest bytes so far, across all ``fully_shard`` calls on the same ranks. Uneven
    shards are stored and sent without padding to the size of the largest shard.

    If ``torch.chunk`` splits no block, ``Aligned`` is the same as ``Shard(dim)``. Otherwise, the
    limits of ``Whole`` apply: torch 2.12 or later is required, and ``fsdp2.compile``, custom
    collectives, communication hooks, an int for ``reshard_after_forward`` and tensor parallelism on
    the same ``dim`` raise an error that names the parameter.

    Args:
        dim: the dim to shard, as in ``Shard``. With ``None``, blocks consist of elements of the
            flattened parameter, as in most optimizers with 8-bit states. The parameter is then
            sharded along dim 0, in groups of rows that consist of complete blocks.
        multiple_of: the block size, in rows (or in elements, if ``dim`` is ``None``).
        at_least: the minimum size of a nonempty shard; a shorter final block is merged with the
            previous block. Optimizers with 8-bit states keep states of small tensors in fp32.

    Raises:
        ConfigError: ``dim`` is not an int; ``multiple_of`` or ``at_least`` is not a positive int.

    Source: fsdp2. veScale's RaggedShard (arXiv 2602.22437) also shards at block boundaries.
    """

    dim: int | None
    multiple_of: int = 128
    at_least: int = 1

    def __post_init__(self) -> None:
        is_dim = self.dim is None or type(self.dim) is int
        _require(is_dim, self, "dim", "an int, or None to align the flattened parameter")
        for name in ("multiple_of", "at_least"):
            count = getattr(self, name)
            _require(type(count) is int and count > 0, self, name, "an int of at least 1")


@dataclass(frozen=True)
class ShardPlacementResult:
    """A parameter's placement and mesh. Return it from ``shard_placement_fn``.

    If parameters of one ``fully_shard`` call have different meshes, they are gathered and reduced
    separately, each over the ranks of its own mesh. Each gradient is the mean over these ranks.

    Args:
        placement: ``Shard(dim)``, ``Replicate()``, ``Whole()``, ``Aligned(dim)``, or ``None`` for
            ``Shard(0)``.
        mesh_info: a 1-D mesh (shard), a 2-D mesh (replicate, shard), or an object with a ``mesh``
            and its ``shard_mesh_dim`` and ``replicate_mesh_dim``. ``None`` uses the call's mesh.

    Source: the class of the same name in torch's ``fully_shard``.
    """

    placement: Placement | Whole | Aligned | None
    mesh_info: Any = None


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class Overlap:
    """The number of prefetched units and the number of reductions in flight; 0 means no overlap.
    ``keeps_parts``: keep the large parts of a root unsharded from forward to backward.
    ``synchronizes``: on a device, the host waits at the end of each backward, so that a root's
    parts can be reduced early, as they always are on a CPU."""

    prefetch: int = 1
    reductions: int = 1
    keeps_parts: bool = False
    synchronizes: bool = False


@dataclass(frozen=True)
class Prefetch:
    """The units that forward or backward of a unit prefetches; None: as in the last step."""

    forward: tuple[Any, ...] | None = None
    backward: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Settings:
    """Run-time settings of one unit; ``FSDPModule.set_*`` replace the instance.

    ``reshard_after_forward`` is the user's argument: ``None`` (True below the root, False at the
    root), a bool, or the number of ranks to reshard to. ``keeps_in_evaluation``: the next forward
    without gradients reuses gathered parameters. The sum of gradients is divided by ``divide_by``
    (None: the number of ranks). ``manual_finalization`` is set on the root: ``finalize_backward``
    ends each backward. ``input_buffers`` is the maximum number of reductions with live inputs
    (None: from ``overlap``).
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
    prefetch: Prefetch = Prefetch()  # frozen

    @cached_property
    def accumulates(self) -> bool:
        return not (self.reduce_grads and self.all_reduce_grads)


class CastBuffer:
    """One buffer in low precision. See [Note: cast buffers]."""

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        self.module = module
        self.name = name
        self._dtype = dtype
        self._origin: torch.dtype | None = None
        self._original: Tensor | None = None
        self._cast: Tensor | None = None

    def cast(self) -> None:
        buffer = self.module._buffers.get(self.name)
        if buffer is None or buffer is self._cast or not is_cast_by_policies(buffer):
            return
        self._origin, self._original = buffer.dtype, buffer
        self._cast = self.module._buffers[self.name] = buffer.to(self._dtype)

    def original(self) -> Tensor | None:
        """Return the buffer in its original dtype, or None if the buffer was not cast."""
        buffer, original = self.module._buffers.get(self.name), self._original
        if buffer is None or self._origin is None or buffer.dtype is not self._dtype:
            return None
        is_own = buffer is self._cast and not buffer.is_meta
        if original is not None and is_own and torch.equal(original.to(self._dtype), buffer):
            return original
        return buffer.detach().to(self._origin)

    def restore(self) -> None:
        original = self.original()
        if original is not None:
            self.module._buffers[self.name] = original
            self._original = self._cast = None


class CastBuffers:
    def __init__(self, sites: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self.members = [CastBuffer(module, name, dtype) for module, name in sites]
        self.is_on = False
        for module in dict.fromkeys(member.module for member in self.members):
            # not a bound method: torch sets an attribute on the hook
            module.register_state_dict_post_hook(functools.partial(self._before_state_leaves))
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def switch(self, is_on: bool) -> None:
        """Cast all buffers, or restore them."""
        self.is_on = is_on
        for member in self.members:
            if is_on:
                member.cast()
            else:
                member.restore()

    def _before_state_leaves(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _metadata: Any,
    ) -> None:
        for member in self.members:
            key = prefix + member.name
            original = member.original() if member.module is module else None
            if original is not None and key in state:
                state[key] = original.detach()

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        for member in self.members:
            if member.module is module:
                member.restore()

    def _after_load(self, module: nn.Module, _keys: Any) -> None:
        for member in self.members:
            if member.module is module and self.is_on:
                member.cast()


def is_cast_by_policies(buffer: Tensor) -> bool:
    """Return True for plain floating-point buffers with more than 8 bits per element."""
    if isinstance(buffer, DTensor):
        return False
    return buffer.is_floating_point() and buffer.dtype.itemsize > 1


class Precision:
    """A unit's policy, as chosen by the user (``chosen``) and as now in effect (``policy``)."""

    def __init__(self, chosen: MixedPrecisionPolicy, modules: Sequence[nn.Module]) -> None:
        self.chosen = chosen
        self.policy = _policy_for(chosen, modules)  # recorded calls compare it by identity
        self.buffers: CastBuffers | None = None
        self.input_dtype: torch.dtype | None = None  # None: inputs are not cast
        self.choose_input_dtype(is_root=False)

    def choose_input_dtype(self, is_root: bool) -> None:
        """Set the dtype to which floating-point inputs are cast. Call after a policy change."""
        policy = self.policy
        casts = policy.cast_forward_inputs or (policy.cast_root_forward_inputs and is_root)
        self.input_dtype = policy.param_dtype if casts else None

    def cast_buffers(self, sites: Iterable[tuple[nn.Module, str]]) -> None:
        """Add the buffers, and cast them if the current policy has a ``buffer_dtype``."""
        assert self.chosen.buffer_dtype is not None
        self.buffers = CastBuffers(sites, self.chosen.buffer_dtype)
        self.buffers.switch(self.policy.buffer_dtype is not None)

    def follow(self, modules: Sequence[nn.Module]) -> bool:
        """Apply the policy for the modules' current mode. Return whether the policy changed."""
        policy = _policy_for(self.chosen, modules)
        if policy == self.policy:
            return False
        self.policy = dataclasses.replace(policy)
        if self.buffers is not None:
            self.buffers.switch(policy.buffer_dtype is not None)
        return True

    def outdate(self) -> None:
        """Replace the policy with an equal copy, so that recorded calls no longer match it."""
        self.policy = dataclasses.replace(self.policy)


def _policy_for(policy: MixedPrecisionPolicy, modules: Iterable[nn.Module]) -> MixedPrecisionPolicy:
    if not policy.full_precision_in_eval or any(module.training for module in modules):
        return policy
    return dataclasses.replace(policy, param_dtype=None, buffer_dtype=None, gather_dtype=None)
