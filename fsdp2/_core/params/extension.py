"""The all-gather extension: parameters that say what is sent for them and what becomes of it.

Owns what the extended parameters of a group add to its all-gather (``ExtensionTail``), the
agreement on the sizes of it, and one parameter's way from inputs to the unsharded tensor
(``Extension``). It must not know flat layouts, states or streams.

[Note: extensions]
A shard that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, from its class or set on the
object, keeps memory of its own and is *extended*. So is a subclass that wraps other tensors, which
has no bytes to send without the methods: it may get them until its first all-gather, which says on
every rank what has none. Before each all-gather it names the tensors to
send; they travel as bytes behind the flat part of the group's buffer. What arrives is handed to it
as ``[sum of rows, *input.shape[1:]]``, always in the same tensors: their storages, and those of the
inner tensors that it returned, are freed when the group reshards and filled again later, so that
the unsharded parameter is one object for life. A third method (``RELEASE``), asked once for each
parameter, may say that what it makes shares no memory with what arrived: that memory is then freed
as soon as the parameter is made.

Of a frozen tensor whose class has no methods we may do the same: see [Note: parts of wrapped
parameters] in ``parts``.

[Note: sizes of extensions]
Ranks may hold different numbers of rows, so only all of them together know how much is sent. They
exchange that once for each plan of the group, in one small collective over the shard axis (and a
flag over the replicate axis), before the first all-gather. A rank whose extension failed says so
there, and every rank raises. Later it says so in the header of what it sends: on a CPU, where
reading that costs nothing, every rank raises then too.

Source: the contract of the extension in ``torch.distributed.fsdp``, torch 2.15.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base import torch_autograd, torch_comm, torch_dtensor, torch_modes
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import ConfigError, FSDPError, StateError
from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.base.rows import Deal
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.process_mesh import carrying, named
from fsdp2._core.params import packing, parts
from fsdp2._core.params.layout import ALIGN_NBYTES, align, contiguous_stride
from fsdp2._core.params.param import FSDPParam

PRE = "fsdp_pre_all_gather"
POST = "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"

MAX_INPUTS = 16
"""Tensors that one parameter may send: what is exchanged about them has a fixed size."""

FAILED, LACKING = -1, -2
"""Counts of inputs of a rank whose extension failed, or that has none."""

HEADER_NBYTES = ALIGN_NBYTES
FAILED_BYTE = 0xEE
"""The header of a tail is zeros, or this in every byte: nothing that memory holds by chance."""


# Which parameters are extended.


def has_extension(tensor: Tensor) -> bool:
    """True if a tensor has any of the two methods."""
    return hasattr(tensor, PRE) or hasattr(tensor, POST)


def needs_extension(tensor: Tensor) -> bool:
    """True if a tensor has an extension, or wraps others and can be gathered by one alone."""
    if has_extension(tensor):
        return True
    return torch_dtensor.is_wrapper_subclass(tensor) and not torch_dtensor.is_on_its_way(tensor)


class _LackingError(StateError):
    """A shard needs an extension, and has none when it is to be gathered."""


def brings_extension(param: Tensor) -> bool:
    """True if an original parameter, tensor-parallel or not, has an extension or needs one."""
    return needs_extension(torch_dtensor.local_part(param))


def check_extension(param: Tensor, fqn: str, by_rows: bool) -> bool | None:
    """Check a parameter to shard, ``by_rows`` or otherwise, if it has or needs an extension.

    Returns what its extension says about the memory of what is gathered; None: it has none yet.

    Raises:
        ConfigError: one of the methods is missing; the parameter is not sharded by rows.
    """
    local = torch_dtensor.local_part(param)
    if has_extension(local):
        _check_both(local, fqn, ConfigError)
    elif _release_method(local) is not None:
        raise ConfigError(
            "FS509",
            f"{fqn}: its {type(local).__name__} has {RELEASE}, and neither {PRE} nor {POST}, which "
            "make an all-gather extension. Add both, or remove this one.",
        )
    if not brings_extension(param):
        return None
    if not by_rows:
        raise ConfigError("FS510", _not_by_rows(fqn))
    return _ask_for_release(local, fqn, ConfigError) if has_extension(local) else None


def _release_method(local: Tensor) -> Callable[..., Any] | None:
    return _method(local, RELEASE) if getattr(local, RELEASE, None) is not None else None


def _ask_for_release(local: Tensor, fqn: str, error: type[FSDPError]) -> bool:
    """Ask an extension whether what was gathered can be freed once the parameter is made of it."""
    method = _release_method(local)
    answer = False if method is None else method()
    if not isinstance(answer, bool):
        raise error(
            "FS509",
            f"{fqn}: {RELEASE} returned {answer!r}, a {type(answer).__name__}. Return True if the "
            f"tensors that {POST} makes share no memory with the gathered ones, else False.",
        )
    return answer


def is_extended(param: FSDPParam, local: Tensor) -> bool:
    """True if ``local``, a shard of the parameter, is extended.

    Raises:
        StateError: both methods are missing though the last shard had them; the parameter is not
            sharded by rows.
    """
    if needs_extension(local):  # whether it has both methods, all ranks are told in prepare
        layout = param.placement.layout
        if layout.dim != 0 or layout.is_dealt:
            raise StateError("FS510", _not_by_rows(param.fqn))
        return True
    if param.is_extended:
        raise StateError(
            "FS511",
            f"{param.fqn}: was sharded with an all-gather extension, and the "
            f"{type(local).__name__} that took the place of its shard has neither {PRE} nor "
            f"{POST}. Methods set on a tensor object do not follow its copies (.to()): "
            "set them on the new local tensor, or use a tensor subclass.",
        )
    return False


def own_shard(whole: Tensor, param: FSDPParam, rank: int) -> Tensor:
    """Let an extended tensor make this rank's shard, on memory of its own.

    Raises:
        ConfigError: it cannot, or the shard has no extension and can get none.
    """
    kind, layout = type(whole).__name__, param.placement.layout
    if layout.is_dealt:
        raise ConfigError("FS510", _not_by_rows(param.fqn))
    if _divides_by_rows(param, whole):
        try:
            shard = parts.shard_by_rows(whole, *layout.span(rank))
        except Exception as error:
            raise ConfigError(
                "FS221",
                f"{param.fqn}: is a {kind}, of which no shard can be made: it lacks {PRE}, and "
                f"{type(error).__name__}: {error}. Let the class define {PRE} and {POST}, or "
                "dequantize(), __tensor_flatten__ and __tensor_unflatten__ of tensors that have a "
                "dim of as many rows; or put the parameter into ignored_params.",
            ) from error
        param.parts, param.divides_parts = parts.parts_by_rows(whole), True
        return shard
    try:  # by operations that the subclass may define itself
        shard = whole.new_zeros(layout.shard_shape(rank))
        if layout.rows(rank):
            shard.copy_(whole.chunk(layout.size, dim=0)[rank])
        if layout.size > 1 and parts.can_be_taken_apart(whole):
            # the first chunk, which is never empty: all ranks see the same
            param.parts = parts.parts_seen(whole, whole.chunk(layout.size, dim=0)[0])
    except Exception as error:
        raise ConfigError(
            "FS221",
            f"{param.fqn}: is a {kind}, of which no shard can be made: {type(error).__name__}: "
            f"{error}. Let the subclass define split, new_zeros and copy_, put the parameter into "
            "ignored_params, or shard a plain one.",
        ) from error
    if not needs_extension(shard):
        raise ConfigError(
            "FS221",
            f"{param.fqn}: a shard of this {kind} is a {type(shard).__name__} without all-gather "
            "extension. Let split, new_zeros and copy_ return the subclass, or set the methods on "
            "the local tensors after fully_shard.",
        )
    return shard


def _divides_by_rows(param: FSDPParam, whole: Tensor) -> bool:
    """True for a frozen tensor that we divide for its class. See [Note: parts of wrapped ...]."""
    if has_extension(whole) or param.trainable or not param.placement.layout.numel:
        return False
    return parts.can_be_taken_apart(whole)


def _check_both(local: Tensor, fqn: str, error: type[FSDPError]) -> None:
    for name, other in ((PRE, POST), (POST, PRE)):
        if not hasattr(local, name):
            raise error(
                "FS509",
                f"{fqn}: its {type(local).__name__} has {other} and no {name}. An all-gather "
                "extension needs both: add the other one, or remove this one.",
            )


def _lacks_extension(local: Tensor, fqn: str, where: str) -> str:
    return (
        f"{fqn}: its shard, a {type(local).__name__}, has no all-gather extension on {where}, and "
        f"cannot be gathered without one. Give the class {PRE} and {POST}, or set both on the "
        "local tensors of all ranks, after fully_shard and again after what copies them (.to()); "
        "or put the parameter into ignored_params"
    )


def smaller_mesh_refused(fqn: str) -> str:
    return (
        f"{fqn}: has an all-gather extension, and such a parameter cannot be sharded over a "
        "smaller mesh between forward and backward. Pass a bool or None for "
        "reshard_after_forward, not an int."
    )


def dealt_refused(fqn: str, deal: Deal) -> str:
    return (
        f"{fqn}: {deal.asked_by}, and such a parameter cannot be sharded over a smaller mesh "
        "between forward and backward. Pass a bool or None for reshard_after_forward, not an int."
    )


def _not_by_rows(fqn: str) -> str:
    return (
        f"{fqn}: has an all-gather extension, or wraps other tensors. Such parameters are sharded "
        "on dim 0, in chunks. Let shard_placement_fn return Shard(0) or None for it, or remove the "
        "extension."
    )


# What is sent.


@dataclass(frozen=True)
class InputLayout:
    """One input as all ranks send it: rows of each rank, and what one row is. Ints only."""

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def most_nbytes(self) -> int:
        """Bytes of the rank with most rows: so much each rank sends."""
        return max(self.rows) * self.row_nbytes

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (sum(self.rows), *self.shape)

    @property
    def output_nbytes(self) -> int:
        return sum(self.rows) * self.row_nbytes


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _signature(tensor: Tensor) -> int:
    """Return what must be equal on all ranks, as a number that fits an int64."""
    return zlib.crc32(repr((tuple(tensor.shape[1:]), str(tensor.dtype))).encode())


class Output:
    """One gathered tensor, on a storage that is freed and filled again.

    It is written through other views than the extension gets, so that autograd does not take an
    all-gather for a modification of what it saved.
    """

    def __init__(self, layout: InputLayout, device: torch.device) -> None:
        self.layout = layout
        self._bytes = torch.empty(layout.output_nbytes, dtype=torch.uint8, device=device)
        self.tensor = self._bytes.view(layout.dtype).view(layout.output_shape).data
        self.storage = self._bytes.untyped_storage()

    def fill(self, gathered: Tensor) -> None:
        """Copy the true rows out of ``[W, nbytes of the tail]``."""
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
    """One extended parameter: its inputs, the outputs it is given, and what it made of them."""

    def __init__(
        self, param: FSDPParam, mesh: DeviceMesh, policy: MixedPrecisionPolicy, device: torch.device
    ) -> None:
        self.param = param
        self.kind = kind_of(param)
        self.layouts: tuple[InputLayout, ...] = ()
        self.inputs: Sequence[Tensor] = ()
        self.error: Exception | None = None
        self._mesh = mesh
        self._policy = policy
        self._device = device
        self._metadata: Any = None
        self._outputs: list[Output] = []
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._versioned: tuple[Tensor, ...] = ()
        self._releases, param.releases_gathered = param.releases_gathered, None  # None: not asked

    def prepare(self) -> None:
        """Ask the shard what to send; keep the error if it fails."""
        self.error, self.inputs = None, ()
        try:
            self.inputs = self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> Sequence[Tensor]:
        fqn, layout = self.param.fqn, self.param.placement.layout
        local = torch_dtensor.local_tensor(self.param.sharded)
        if self.param.divides_parts and not has_extension(local):
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
                f"{fqn}: {PRE} returned inputs that are no tuple of plain tensors. Return the "
                "inner tensors of a subclass, not the subclass.",
            )
        if len(inputs) > MAX_INPUTS:
            raise StateError(
                "FS512",
                f"{fqn}: {PRE} returned {len(inputs)} inputs, and at most {MAX_INPUTS} can be "
                "gathered for one parameter. Join some.",
            )
        return inputs

    def describe(self) -> list[int]:
        """Return what other ranks must know of the inputs: a row of fixed size."""
        if self.error is not None:
            count = LACKING if isinstance(self.error, _LackingError) else FAILED
            return [count] + [0] * (2 * MAX_INPUTS)
        row = [len(self.inputs)]
        for tensor in self.inputs:
            row += [_rows(tensor), _signature(tensor)]
        return row + [0] * (2 * MAX_INPUTS + 1 - len(row))

    def settle(self, rows: list[list[int]], start: int, axis: MeshAxis) -> str | None:
        """Plan from the descriptions of all ranks; return what does not fit, if anything."""
        lacking = [rank for rank, row in enumerate(rows) if row[0] == LACKING]
        if lacking:
            local = torch_dtensor.local_tensor(self.param.sharded)
            return _lacks_extension(local, self.param.fqn, _ranks(lacking, axis))
        failed = [rank for rank, row in enumerate(rows) if row[0] == FAILED]
        if failed:
            return f"{self.param.fqn}: {PRE} failed on {_ranks(failed, axis)}"
        count = rows[0][0]
        layouts = []
        for position in range(count):
            pairs = [row[1 + 2 * position : 3 + 2 * position] for row in rows]
            if any(row[0] != count for row in rows) or len({pair[1] for pair in pairs}) > 1:
                break
            tensor = self.inputs[position]
            shape = tuple(tensor.shape[1:])
            layout = InputLayout(tuple(pair[0] for pair in pairs), shape, tensor.dtype, start)
            start += align(layout.most_nbytes)
            layouts.append(layout)
        if len(layouts) != count or any(row[0] != count for row in rows):
            mine = [(tuple(tensor.shape), tensor.dtype) for tensor in self.inputs]
            return (
                f"{self.param.fqn}: {PRE} returned other inputs on some ranks (here "
                f"{mine}). Ranks may differ in the first dim only"
            )
        self._build(tuple(layouts))
        return None

    def _build(self, layouts: tuple[InputLayout, ...]) -> None:
        shapes = [(layout.rows, layout.shape, layout.dtype) for layout in layouts]
        if shapes != [(layout.rows, layout.shape, layout.dtype) for layout in self.layouts]:
            self._outputs, self._storages, self._versioned = [], [], ()
        self.layouts = layouts
        for output, layout in zip(self._outputs, layouts, strict=False):
            output.layout = layout

    @property
    def end(self) -> int | None:
        """Where the last input ends in the tail; None if nothing is sent."""
        return (
            self.layouts[-1].start + align(self.layouts[-1].most_nbytes) if self.layouts else None
        )

    def pack(self, tail: Tensor, rank: int) -> None:
        """Copy the inputs into the bytes to send; keep the error if they do not fit the plan."""
        inputs, self.inputs = self.inputs, ()
        if self.error is not None:
            return
        found = [(_rows(t), tuple(t.shape[1:]), t.dtype) for t in inputs]
        planned = [(layout.rows[rank], layout.shape, layout.dtype) for layout in self.layouts]
        if found != planned:
            self.error = StateError(
                "FS512",
                f"{self.param.fqn}: {PRE} returned inputs of other shapes or dtypes than the first "
                f"time: found (rows, shape of a row, dtype) {found}, expected {planned}. Shapes "
                "must stay as they are while the parameter does.",
            )
            return
        for tensor, layout in zip(inputs, self.layouts, strict=True):
            if tensor.numel():
                place = packing.typed(tail, layout.start, tensor.numel(), layout.dtype)
                place.view(tensor.shape).copy_(tensor)

    def unpack(self, gathered: Tensor) -> None:
        """Fill the outputs from ``[W, nbytes of the tail]`` and let the shard make the whole."""
        if not self._outputs:
            self._outputs = [Output(layout, self._device) for layout in self.layouts]
        for storage, nbytes in self._storages:
            storage.resize_(nbytes)
        for output in self._outputs:
            output.fill(gathered)
        local = torch_dtensor.local_tensor(self.param.sharded)
        outputs = tuple(output.tensor for output in self._outputs)
        if self.param.divides_parts and not has_extension(local):
            self._put_together(local, outputs)
            return
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
        assert self.param.parts is not None
        return self.param.parts

    def _put_together(self, local: Tensor, outputs: tuple[Tensor, ...]) -> None:
        """Do for a class what its own extension would. See [Note: parts of wrapped parameters]."""
        if self._is_intact:
            whole = torch_dtensor.local_part(self.param.unsharded)  # type: ignore[arg-type]  # it is there
            with torch_autograd.preserved_versions(self._versioned):
                parts.fill_again(whole, self._parts, outputs)
        else:
            shape = self.param.placement.layout.shape
            self._adopt(parts.whole_of(local, self._parts, outputs, shape))

    @property
    def _is_intact(self) -> bool:
        """True if the unsharded parameter is the one made here, and the user did not cast it."""
        unsharded = self.param.unsharded
        if unsharded is None or not self._versioned or unsharded is not self._versioned[0]:
            return False
        return unsharded.dtype is self.param.unsharded_dtype

    def _adopt(self, result: Any) -> None:
        """Make the unsharded parameter of what the shard returned the first time."""
        fqn, shape = self.param.fqn, self.param.placement.layout.shape
        tensor, inner = result if isinstance(result, tuple) and len(result) == 2 else (None, ())
        if not isinstance(tensor, Tensor) or not isinstance(inner, tuple | list):
            raise StateError(
                "FS513",
                f"{fqn}: {POST} returned {type(result).__name__}. Return (tensor, inner tensors), "
                "the second a tuple, where out is None.",
            )
        if tuple(tensor.shape) != shape:
            if tensor.numel() < math.prod(shape):
                raise StateError(
                    "FS513",
                    f"{fqn}: {POST} returned a tensor of shape {tuple(tensor.shape)}, expected "
                    f"{shape}, or more rows of padding behind it.",
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
        """Raise StateError if what was made shares memory with what is about to be freed."""
        gathered = {
            output.storage.data_ptr() for output in self._outputs if output.storage.nbytes()
        }
        if any(leaf.untyped_storage().data_ptr() in gathered for leaf in made):
            raise StateError(
                "FS513",
                f"{self.param.fqn}: {RELEASE} returned True, and {POST} returned a tensor that "
                "shares memory with the gathered ones, which would be freed. Return False there, "
                "or copy here.",
            )

    def free(self) -> None:
        """Free everything gathered, and what was made of it."""
        for storage, _ in self._storages:
            storage.resize_(0)
        self._free_outputs()

    def _free_outputs(self) -> None:
        for output in self._outputs:
            output.storage.resize_(0)


def kind_of(param: FSDPParam) -> tuple[type, torch.dtype]:
    """Return what must stay if an unsharded parameter is to be filled again, not made anew."""
    local = torch_dtensor.local_tensor(param.sharded)
    return type(local), local.dtype


def _method(local: Tensor, name: str) -> Callable[..., Any]:
    """Return a method of a shard, bound to it: a deepcopy binds it to yet another tensor."""
    method: Callable[..., Any] = getattr(local, name)
    if isinstance(method, MethodType) and isinstance(method.__self__, Tensor):
        return MethodType(method.__func__, local)
    return method


def _takes_all(method: Callable[..., Any], fqn: str) -> bool:
    """True for the signature of five arguments, False for that of the mesh alone."""
    parameters = inspect.signature(method).parameters
    if len(parameters) not in (1, 5):
        raise StateError(
            "FS512",
            f"{fqn}: {PRE} takes {len(parameters)} arguments. Let it take (mesh) or (mesh, "
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
    """Yield the tensors with memory that a wrapper holds; a plain tensor itself."""
    if not torch_dtensor.is_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a wrapper has it
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor names its mesh too
            yield from _leaves(part)


def _ranks(ranks: list[int], axis: MeshAxis) -> str:
    return "rank " + ", ".join(str(axis.global_ranks[rank]) for rank in ranks)


class ExtensionTail:
    """What the extended parameters of a group send behind its flat buffer."""

    def __init__(self, data: DataMesh, policy: MixedPrecisionPolicy, device: torch.device) -> None:
        self.items: list[Extension] = []
        self.is_agreed = True
        self.nbytes = 0
        self._data = data
        self._policy = policy
        self._device = device

    def plan(self, params: Sequence[FSDPParam]) -> None:
        """Take the extended parameters of a new plan. Those that stay keep what they made."""
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
        """Ask every shard what to send. See [Note: sizes of extensions].

        Collective until sizes are agreed on.

        Raises:
            StateError: an extension failed, here or on another rank, or ranks do not fit together.
        """
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
            start = item.end or start
        failed = _exchange(torch.tensor([int(problem is not None)], device=self._device), replicate)
        if problem is None and failed.any():
            problem = (
                f"{self.items[0].param.fqn} (or beside it): {PRE} failed, or is missing, on "
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
        """Write what this rank sends into ``tail``, bytes."""
        for item in self.items:
            item.pack(tail, self._data.shard.rank)
        if not capabilities(self._device).is_host:
            self._raise_own()
        failed = any(item.error is not None for item in self.items)
        tail[:HEADER_NBYTES] = FAILED_BYTE if failed else 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def arrived(self, gathered: Tensor) -> None:
        """Make the unsharded parameters of ``[W, nbytes]`` gathered bytes.

        Raises:
            StateError: the extension of a rank failed.
        """
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
            "FS514", f"{names}: {PRE} of one of these failed on {where}; see its error."
        )

    def free(self) -> None:
        """Free what was gathered; the next gather fills it again."""
        for item in self.items:
            item.free()


def _exchange(own: Tensor, axis: MeshAxis) -> Tensor:
    """Return ``own`` of every rank of an axis, ``[W, *own.shape]``."""
    if axis.size == 1:
        return own.unsqueeze(0)
    received = own.reshape(-1).repeat(axis.size)
    with torch_modes.hidden_from_modes(), carrying():
        torch_comm.all_gather_single(received, own.reshape(-1), axis.pg, False)
    return received.view(axis.size, *own.shape)
