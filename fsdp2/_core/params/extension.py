"""All-gather extensions: parameters whose methods select the tensors to gather and use the result.

``Extension`` handles one parameter, from its inputs to the unsharded tensor. ``ExtensionTail`` is
the data that a group's extended parameters append to the group's all-gather, after ranks have
agreed on the size of this data. Contains no code for flat layouts, states or streams.

[Note: extensions]
A shard with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, defined by its class or set on
the object, is *extended* and stays outside the flat buffer. A wrapper subclass is extended too,
because without these methods it has no bytes to send. The methods may be added until the shard's
first all-gather, which raises on every rank if they are missing. Before each all-gather, the pre
method returns tensors, which are sent as bytes after the flat part of the group's buffer. The post
method receives gathered tensors of shape ``[sum of rows, *input.shape[1:]]``, which are the same
tensors in every call. Their storages, and those of the inner tensors that the post method returned,
are freed on reshard and refilled later, so the unsharded parameter stays the same object. A third
method (``RELEASE``), called once per parameter, may report that the post method's result shares no
memory with the gathered tensors, which are then freed early.

Frozen tensors whose class lacks these methods may be gathered in the same way: see [Note: parts of
wrapped parameters] in ``parts``.

[Note: sizes of extensions]
Ranks may have different numbers of rows, so a rank alone cannot compute the size of the gather.
Therefore, once per plan of the group, before the first all-gather, ranks exchange their sizes in
one small collective over the shard axis, and one flag over the replicate axis. If an extension
failed on any rank, every rank then raises. A rank reports a later failure in the header of its
data. On CPUs, where reading headers costs nothing, every rank raises for later failures too.

Source: the contract of extensions in ``torch.distributed.fsdp`` of torch 2.15.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base import torch_autograd, torch_comm, torch_dtensor, torch_modes
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import ConfigError, FSDPError, StateError, carrying, named
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.base.rows import Deal
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.params import packing, parts
from fsdp2._core.params.layout import ALIGN_NBYTES, align, contiguous_stride
from fsdp2._core.params.param import FSDPParam

PRE = "fsdp_pre_all_gather"
POST = "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

MAX_INPUTS = 16  # per parameter, because ranks exchange descriptions of a fixed size

FAILED, LACKING = -1, -2  # sent instead of an input count if the extension fails, or is missing

HEADER_NBYTES = ALIGN_NBYTES
FAILED_BYTE = 0xEE  # in header bytes after a failure, else 0; unlikely in stale memory


def has_extension(tensor: Tensor) -> bool:
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def needs_extension(tensor: Tensor) -> bool:
    """Return True if a tensor has an extension, or needs one because it is a wrapper."""
    if has_extension(tensor):
        return True
    return torch_dtensor.is_wrapper_subclass(tensor) and not torch_dtensor.is_on_its_way(tensor)


class _LackingError(StateError):
    """Raised before a gather if a shard lacks the extension that it needs."""


def check_extension(param: Tensor, fqn: str, by_rows: bool) -> bool | None:
    """Check the extension of a parameter, if it has or needs one. Return whether gathered memory
    can be freed early, or None if there is no extension yet. ConfigError: a method is missing, or
    the parameter is not sharded ``by_rows``."""
    local = torch_dtensor.local_part(param)
    if has_extension(local):
        _check_both(local, fqn, ConfigError)
    elif getattr(local, RELEASE, None) is not None:
        raise ConfigError(
            "FS509",
            f"{fqn}: its {type(local).__name__} has {RELEASE}, but neither {PRE} nor {POST}, which "
            f"an all-gather extension needs. Add both, or remove {RELEASE}.",
        )
    if not needs_extension(local):
        return None
    if not by_rows:
        raise ConfigError("FS510", _not_by_rows(fqn))
    return _ask_for_release(local, fqn, ConfigError) if has_extension(local) else None


def _ask_for_release(local: Tensor, fqn: str, error: type[FSDPError]) -> bool:
    """Return whether gathered memory can be freed once the unsharded parameter is made."""
    answer = False if getattr(local, RELEASE, None) is None else _method(local, RELEASE)()
    if not isinstance(answer, bool):
        raise error(
            "FS509",
            f"{fqn}: {RELEASE} returned {answer!r}, a {type(answer).__name__}. Return True if the "
            f"tensors that {POST} returns share no memory with the gathered ones, else False.",
        )
    return answer


def is_extended(param: FSDPParam, local: Tensor) -> bool:
    """Return True if ``local``, a shard of the parameter, is extended. StateError: the parameter is
    not sharded by rows, or ``local`` lacks the methods of the previous shard."""
    if needs_extension(local):  # prepare reports a missing method to all ranks
        layout = param.placement.layout
        if layout.dim != 0 or layout.deal is not None:
            raise StateError("FS510", _not_by_rows(param.fqn))
        return True
    if param.wrapped.is_extended:
        raise StateError(
            "FS511",
            f"{param.fqn} was sharded with an all-gather extension, but the "
            f"{type(local).__name__} that replaced its shard has neither {PRE} nor {POST}. A copy "
            "of a tensor (.to()) lacks the methods that were set on the tensor object: set them on "
            "the new local tensor, or use a tensor subclass.",
        )
    return False


def own_shard(whole: Tensor, param: FSDPParam, rank: int) -> Tensor:
    """Make this rank's shard of an extended tensor, in separate memory, or raise ConfigError."""
    kind, layout = type(whole).__name__, param.placement.layout
    if layout.deal is not None:
        raise ConfigError("FS510", _not_by_rows(param.fqn))
    is_plain_and_frozen = not has_extension(whole) and not param.trainable
    if is_plain_and_frozen and layout.numel and parts.can_be_taken_apart(whole):
        try:  # shard the inner tensors
            shard = parts.shard_by_rows(whole, *layout.span(rank))
        except Exception as error:
            raise ConfigError(
                "FS221",
                f"{param.fqn} is a {kind}, which cannot be sharded: it lacks {PRE}, and sharding "
                f"its inner tensors failed with {type(error).__name__}: {error}. Define {PRE} and "
                f"{POST} in the class; or define dequantize(), __tensor_flatten__ and "
                "__tensor_unflatten__, with inner tensors that have a dim whose size is the number "
                "of rows; or add the parameter to ignored_params.",
            ) from error
        param.wrapped.parts, param.wrapped.divides_parts = parts.parts_by_rows(whole), True
        return shard
    try:  # runs operations that the subclass may define
        shard = whole.new_zeros(layout.shard_shape(rank))
        if layout.rows(rank):
            shard.copy_(whole.chunk(layout.size, dim=0)[rank])
        if layout.size > 1 and parts.can_be_taken_apart(whole):
            # compare with the first chunk, which is never empty
            param.wrapped.parts = parts.parts_seen(whole, whole.chunk(layout.size, dim=0)[0])
    except Exception as error:
        raise ConfigError(
            "FS221",
            f"{param.fqn} is a {kind}, which cannot be sharded: {type(error).__name__}: {error}. "
            "Define split, new_zeros and copy_ in the subclass, add the parameter to "
            "ignored_params, or use a plain parameter.",
        ) from error
    if not needs_extension(shard):
        raise ConfigError(
            "FS221",
            f"{param.fqn}: a shard of this {kind} is a {type(shard).__name__} without an "
            "all-gather extension. Return the subclass from split, new_zeros and copy_, or set "
            f"{PRE} and {POST} on the local tensors after fully_shard.",
        )
    return shard


def _check_both(local: Tensor, fqn: str, error: type[FSDPError]) -> None:
    for name, other in ((PRE, POST), (POST, PRE)):
        if not hasattr(local, name):
            raise error(
                "FS509",
                f"{fqn}: its {type(local).__name__} has {other}, but no {name}. An all-gather "
                "extension needs both: add the missing one, or remove the other.",
            )


def _lacks_extension(local: Tensor, fqn: str, where: str) -> str:
    return (
        f"{fqn}: its shard, a {type(local).__name__}, has no all-gather extension on {where}, and "
        f"cannot be gathered without one. Define {PRE} and {POST} in the class, or set both on the "
        "local tensors of all ranks, after fully_shard and again after each copy (.to()); or add "
        "the parameter to ignored_params"
    )


def refuse_smaller(fqn: str, deal: Deal | None) -> NoReturn:
    """Raise ConfigError for a dealt or extended parameter, which cannot use a smaller mesh."""
    why = "has an all-gather extension" if deal is None else deal.asked_by
    raise ConfigError(
        "FS211",
        f"{fqn} {why}, so it cannot be sharded over a smaller mesh between forward and backward. "
        "Pass a bool or None for reshard_after_forward, not an int.",
    )


def _not_by_rows(fqn: str) -> str:
    return (
        f"{fqn} has an all-gather extension, or wraps other tensors, so it must be sharded on dim "
        "0, in chunks. Return Shard(0) or None for it from shard_placement_fn, or remove the "
        "extension."
    )


# Data to send.


@dataclass(frozen=True)
class InputLayout:
    """Layout of one input over all ranks: rows per rank, a row's shape and dtype, byte offset."""

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def most_nbytes(self) -> int:
        """Number of bytes that each rank sends: all pad to the size of the largest input."""
        return max(self.rows) * self.row_nbytes

    @property
    def output_nbytes(self) -> int:
        return sum(self.rows) * self.row_nbytes


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _signature(tensor: Tensor) -> int:
    """Return a hash of the properties that must be equal on all ranks."""
    return zlib.crc32(repr((tuple(tensor.shape[1:]), str(tensor.dtype))).encode())


class Output:
    """One gathered tensor, whose storage is freed and refilled. It is written through another view,
    so that writes do not increment its version."""

    def __init__(self, layout: InputLayout, device: torch.device) -> None:
        self.layout = layout
        self._bytes = torch.empty(layout.output_nbytes, dtype=torch.uint8, device=device)
        self.tensor = self._bytes.view(layout.dtype).view(sum(layout.rows), *layout.shape).data
        self.storage = self._bytes.untyped_storage()

    def fill(self, gathered: Tensor) -> None:
        """Copy the rows, without padding, from gathered tails ``[W, nbytes]``."""
        layout = self.layout
        self.storage.resize_(layout.output_nbytes)
        nbytes = layout.most_nbytes
        if nbytes == 0:
            return
        found = gathered[:, layout.start : layout.start + nbytes]
        most, size = max(layout.rows), len(layout.rows)
        full = next((rank for rank in range(size) if layout.rows[rank] != most), size)
        end = full * nbytes
        self._bytes[:end].view(full, nbytes).copy_(found[:full])
        for rank in range(full, size):
            own = layout.rows[rank] * layout.row_nbytes
            self._bytes[end : end + own].copy_(found[rank, :own])
            end += own


class Extension:
    """One extended parameter: its inputs, its gathered outputs, and the tensors made from them."""

    def __init__(
        self,
        param: FSDPParam,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
    ) -> None:
        self.param = param
        self.kind = kind_of(param)
        self.layouts: tuple[InputLayout, ...] = ()
        self.end = HEADER_NBYTES  # end of the last input in the tail
        self.inputs: Sequence[Tensor] = ()
        self.error: Exception | None = None
        self._mesh = mesh
        self._policy = policy
        self._device = device
        self._metadata: Any = None
        self._outputs: list[Output] = []
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._versioned: tuple[Tensor, ...] = ()
        self._releases, param.wrapped.releases_gathered = param.wrapped.releases_gathered, None

    def prepare(self) -> None:
        """Call the shard's pre-gather method; store the exception if it fails."""
        self.error, self.inputs = None, ()
        try:
            self.inputs = self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> Sequence[Tensor]:
        fqn, layout = self.param.fqn, self.param.placement.layout
        local = torch_dtensor.local_tensor(self.param.sharded)
        if self.param.wrapped.divides_parts and not has_extension(local):
            moved = local.to(self._device) if local.device != self._device else local
            return parts.to_send(moved, self._parts)
        if not has_extension(local):
            raise _LackingError("FS511", _lacks_extension(local, fqn, "this rank"))
        _check_both(local, fqn, StateError)
        if self._releases is None:
            self._releases = _ask_for_release(local, fqn, StateError)
        if local.device != self._device:
            moved = local.to(self._device, non_blocking=True)
            local = moved if has_extension(moved) else local
        method = _method(local, PRE)
        arguments: tuple[Any, ...] = (self._mesh,)
        if _takes_all(method, fqn):
            shape, module = torch.Size(layout.shape), self.param.sites[0].module
            arguments = (self._mesh, shape, layout.stride, module, self._policy)
        result = method(*arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StateError(
                "FS512",
                f"{fqn}: {PRE} returned {type(result).__name__}. Return (inputs, metadata), where "
                "inputs is a tuple of the tensors to gather.",
            )
        inputs, self._metadata = result
        if not isinstance(inputs, tuple | list) or not all(_is_plain(t) for t in inputs):
            raise StateError(
                "FS512",
                f"{fqn}: {PRE} returned inputs that are not a tuple of plain tensors. Return the "
                "inner tensors of a subclass, not the subclass.",
            )
        if len(inputs) > MAX_INPUTS:
            raise StateError(
                "FS512",
                f"{fqn}: {PRE} returned {len(inputs)} inputs, but at most {MAX_INPUTS} can be "
                "gathered for one parameter. Combine some of them.",
            )
        return inputs

    def describe(self) -> list[int]:
        """Describe the inputs for other ranks, as a fixed number of integers."""
        row = [len(self.inputs)]
        if self.error is not None:
            row = [LACKING if isinstance(self.error, _LackingError) else FAILED]
        for tensor in self.inputs:
            row += [_rows(tensor), _signature(tensor)]
        return row + [0] * (2 * MAX_INPUTS + 1 - len(row))

    def settle(
        self,
        rows: list[list[int]],
        start: int,
        axis: MeshAxis,
    ) -> str | None:
        """Plan the layouts from all ranks' descriptions. Return the problem found, or None."""
        lacking = [rank for rank, row in enumerate(rows) if row[0] == LACKING]
        if lacking:
            local = torch_dtensor.local_tensor(self.param.sharded)
            return _lacks_extension(local, self.param.fqn, _ranks(lacking, axis))
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if failed:
            return f"{self.param.fqn}: {PRE} failed on {_ranks(failed, axis)}"
        if len({(row[0], *row[2::2]) for row in rows}) > 1:  # counts and signatures of inputs
            mine = [(tuple(tensor.shape), tensor.dtype) for tensor in self.inputs]
            return (
                f"{self.param.fqn}: {PRE} returned different inputs on some ranks (here {mine}). "
                "Only the first dim may differ between ranks"
            )
        before, layouts = self.layouts, []
        for position, tensor in enumerate(self.inputs):
            counts = tuple(row[1 + 2 * position] for row in rows)
            layout = InputLayout(counts, tuple(tensor.shape[1:]), tensor.dtype, start)
            start += align(layout.most_nbytes)
            layouts.append(layout)
        self.layouts, self.end = tuple(layouts), start
        shapes = [(one.rows, one.shape, one.dtype) for one in layouts]
        if shapes != [(one.rows, one.shape, one.dtype) for one in before]:
            self._outputs, self._storages, self._versioned = [], [], ()
        for output, layout in zip(self._outputs, layouts, strict=False):
            output.layout = layout
        return None

    def pack(self, tail: Tensor, rank: int) -> None:
        """Copy the inputs to ``tail``, or store an error if they do not match the plan."""
        inputs, self.inputs = self.inputs, ()
        if self.error is not None:
            return
        found = [(_rows(t), tuple(t.shape[1:]), t.dtype) for t in inputs]
        planned = [(layout.rows[rank], layout.shape, layout.dtype) for layout in self.layouts]
        if found != planned:
            self.error = StateError(
                "FS512",
                f"{self.param.fqn}: {PRE} returned inputs whose shapes or dtypes differ from those "
                f"of the first call. Found (rows, shape of a row, dtype) {found}, previously "
                f"{planned}. Return the same shapes and dtypes until the parameter is replaced.",
            )
            return
        for tensor, layout in zip(inputs, self.layouts, strict=True):
            if tensor.numel():
                place = packing.typed(tail, layout.start, tensor.numel(), layout.dtype)
                place.view(tensor.shape).copy_(tensor)

    def unpack(self, gathered: Tensor) -> None:
        """Fill the outputs from gathered tails ``[W, nbytes]``; make the unsharded parameter."""
        if not self._outputs:
            self._outputs = [Output(layout, self._device) for layout in self.layouts]
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
        for output in self._outputs:
            output.fill(gathered)
        local = torch_dtensor.local_tensor(self.param.sharded)
        outputs = tuple(output.tensor for output in self._outputs)
        shape = self.param.placement.layout.shape
        method: Callable[..., Any] = partial(parts.rebuild, local, self._parts, shape)
        if has_extension(local):
            method = _method(local, POST)
        if self._is_intact:
            with torch_autograd.preserved_versions(self._versioned):
                method(outputs, self._metadata, self.param.compute_dtype, out=self.param.unsharded)
        else:
            self._adopt(method(outputs, self._metadata, self.param.compute_dtype))
        if self._releases:
            self._free_outputs()

    @property
    def _parts(self) -> tuple[parts.Part, ...]:
        return self.param.wrapped.parts or ()

    @property
    def _is_intact(self) -> bool:
        """Return True if the unsharded parameter was made here and not cast afterwards."""
        unsharded = self.param.unsharded
        if unsharded is None or not self._versioned or unsharded is not self._versioned[0]:
            return False
        return unsharded.dtype is self.param.unsharded_dtype

    def _adopt(self, result: Any) -> None:
        fqn, shape = self.param.fqn, self.param.placement.layout.shape
        tensor, inner = result if isinstance(result, tuple) and len(result) == 2 else (None, ())
        if not isinstance(tensor, Tensor) or not isinstance(inner, tuple | list):
            raise StateError(
                "FS513",
                f"{fqn}: {POST} returned {type(result).__name__}. If out is None, return (tensor, "
                "inner_tensors), where inner_tensors is a tuple.",
            )
        if tuple(tensor.shape) != shape:
            if tensor.numel() < math.prod(shape):
                raise StateError(
                    "FS513",
                    f"{fqn}: {POST} returned a tensor of shape {tuple(tensor.shape)}. Return "
                    f"{shape}, or more rows if the additional rows are padding.",
                )
            tensor = tensor.as_strided(shape, contiguous_stride(shape), 0)
        leaves = [leaf for part in inner for leaf in _leaves(part)]
        storages = [output.storage for output in self._outputs]
        if self._releases:
            self._check_apart([*leaves, *_leaves(tensor)])
            storages = []
        self.param.set_unsharded(tensor)
        assert self.param.unsharded is not None
        storages += [leaf.untyped_storage() for leaf in leaves]
        found = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]
        own = [leaf for leaf in _leaves(self.param.unsharded) if leaf is not self.param.unsharded]
        self._versioned = (self.param.unsharded, *own, *leaves)

    def _check_apart(self, made: Sequence[Tensor]) -> None:
        gathered = {
            output.storage.data_ptr() for output in self._outputs if output.storage.nbytes()
        }
        if any(leaf.untyped_storage().data_ptr() in gathered for leaf in made):
            raise StateError(
                "FS513",
                f"{self.param.fqn}: {RELEASE} returned True, but {POST} returned a tensor that "
                "shares memory with the gathered ones, which would be freed. Return a copy from "
                f"{POST}, or False from {RELEASE}.",
            )

    def free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        self._free_outputs()

    def _free_outputs(self) -> None:
        for output in self._outputs:
            output.storage.resize_(0)


def kind_of(param: FSDPParam) -> tuple[type, torch.dtype]:
    """Return the properties of a shard that, if changed, require a new unsharded parameter."""
    local = torch_dtensor.local_tensor(param.sharded)
    return type(local), local.dtype


def _method(local: Tensor, name: str) -> Callable[..., Any]:
    """Return a shard's method, rebound to the shard, because a deepcopy keeps the old binding."""
    method: Callable[..., Any] = getattr(local, name)
    if isinstance(method, MethodType) and isinstance(method.__self__, Tensor):
        return MethodType(method.__func__, local)
    return method


def _takes_all(method: Callable[..., Any], fqn: str) -> bool:
    """Return True if a method takes all five arguments, False if it takes only the mesh."""
    parameters = inspect.signature(method).parameters
    if len(parameters) not in (1, 5):
        raise StateError(
            "FS512",
            f"{fqn}: {PRE} takes {len(parameters)} arguments. Define it with (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy).",
        )
    return len(parameters) == 5


def _is_plain(tensor: object) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not torch_dtensor.is_wrapper_subclass(tensor)
    )


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield ``tensor`` if it is plain, else the plain tensors inside the wrapper."""
    if not torch_dtensor.is_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a wrapper has it
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor also lists its mesh
            yield from _leaves(part)


def _ranks(ranks: list[int], axis: MeshAxis) -> str:
    return "rank " + ", ".join(str(axis.global_ranks[rank]) for rank in ranks)


@dataclass(eq=False)
class ExtensionTail:
    """The data that a group's extended parameters send after the group's flat buffer."""

    _data: DataMesh
    _policy: MixedPrecisionPolicy
    _device: torch.device
    items: list[Extension] = field(default_factory=list)
    is_agreed: bool = True
    nbytes: int = 0

    def plan(self, params: Sequence[FSDPParam]) -> None:
        """Set the extended parameters of a new plan. Unchanged parameters keep their outputs."""
        if not params:
            self.items = []
            return
        mesh, name = self._data.mesh, self._data.shard.name
        if mesh.ndim > 1:
            mesh = mesh[name]
        known = {item.param: item for item in self.items if item.kind == kind_of(item.param)}
        self.items = [
            known.get(param) or Extension(param, mesh, self._policy, self._device)
            for param in params
        ]
        self.is_agreed = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def before(self) -> None:
        """Collect the inputs of all shards. Collective if ranks must agree on sizes first: [Note:
        sizes of extensions]. StateError: an extension failed on a rank, or inputs do not match."""
        for item in self.items:
            item.prepare()
        if not self.is_agreed:
            self._agree()
        if not capabilities(self._device).is_host:
            self._raise_own()

    def _agree(self) -> None:
        axis, replicate = self._data.shard, self._data.replicate
        own = torch.tensor([item.describe() for item in self.items], device=self._device)
        with named(f"{self.items[0].param.fqn}: sizes for {PRE}"):
            tables = _exchange(own, axis).tolist()
        start, problem = HEADER_NBYTES, None
        for position, item in enumerate(self.items):
            found = item.settle([table[position] for table in tables], start, axis)
            if found is not None and problem is None:
                problem = found
            start = item.end
        failed = _exchange(torch.tensor([int(problem is not None)], device=self._device), replicate)
        if problem is None and failed.any():
            problem = (
                f"{self.items[0].param.fqn} (or another parameter): {PRE} failed or is missing on "
                "another replica"
            )
        if problem is not None:
            errors = [item.error for item in self.items if item.error is not None]
            error = next((e for e in errors if not isinstance(e, _LackingError)), None)
            cause = "" if error is None else f": {type(error).__name__}: {error}"
            for item in self.items:
                item.inputs = ()
            raise StateError(
                "FS514", f"{problem}{cause.rstrip('.')}. Nothing was gathered."
            ) from error
        self.nbytes, self.is_agreed = start, True

    def _raise_own(self) -> None:
        for item in self.items:
            if item.error is not None:
                raise item.error

    @torch.no_grad()
    def write(self, tail: Tensor) -> None:
        for item in self.items:
            item.pack(tail, self._data.shard.rank)
        if not capabilities(self._device).is_host:
            self._raise_own()
        failed = any(item.error is not None for item in self.items)
        tail[:HEADER_NBYTES] = FAILED_BYTE if failed else 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def arrived(self, gathered: Tensor) -> None:
        """Make the parameters from gathered tails ``[W, nbytes]``; StateError if a rank failed."""
        if capabilities(self._device).is_host:
            flags = (gathered[:, :HEADER_NBYTES] == FAILED_BYTE).all(dim=1).tolist()
            if any(flags):
                self._raise_failed([rank for rank, flag in enumerate(flags) if flag])
        try:
            for item in self.items:
                item.unpack(gathered)
        except BaseException:
            self.free()
            raise

    def _raise_failed(self, ranks: list[int]) -> None:
        where = _ranks(ranks, self._data.shard)
        for item in self.items:
            if item.error is not None:
                raise StateError(
                    "FS514", f"{item.param.fqn}: {PRE} failed on {where}: {item.error}"
                ) from item.error
        names = ", ".join(item.param.fqn for item in self.items)
        raise StateError(
            "FS514",
            f"{names}: {PRE} failed for one of these parameters on {where}; see the error there.",
        )

    def free(self) -> None:
        for item in self.items:
            item.free()


def _exchange(own: Tensor, axis: MeshAxis) -> Tensor:
    if axis.size == 1:
        return own.unsqueeze(0)
    received = own.reshape(-1).repeat(axis.size)
    with torch_modes.hidden_from_modes(), carrying():
        torch_comm.all_gather_single(received, own.reshape(-1), axis.pg, False)
    return received.view(axis.size, *own.shape)
