"""Private torch API for a DTensor whose rows are dealt to ranks in whole blocks.

Torch's DTensor supports only chunks of equal size, and its operation rules turn any other placement
into a plain ``Shard``. A tensor with dealt rows is therefore an instance of a DTensor subclass that
handles dispatch: element-wise operations run on local rows; views are views of local memory; all
other operations run on a replicated DTensor. Tested with torch 2.12.1, 2.13.0 and 2.14.1; torch
2.11 does not dispatch to subclasses of DTensor.

[Note: dealt placements]
``Dealt`` is a ``Shard`` from which torch reads row offsets, for example for checkpoints. It equals
``Shard(dim)``, as torch's specs require of a shard, but two ``Dealt`` placements with different
deals are not equal. Torch's own operations never receive ``Dealt``, because ``DealtTensor`` handles
their dispatch. However, torch can create a plain DTensor with ``Dealt`` placements (in
``from_local``, or when torch's helpers load states), and would silently use wrong chunk sizes for
it. Torch first looks up each operation by a hash of the placements, so ``Dealt.__hash__`` raises an
error. Our code converts such DTensors to ``DealtTensor`` (see ``adopt``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # specs of results

from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.base.rows import Deal, chunk_of, most_rows, rows_of

MADE_ALIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "clone", "detach", "alias", "lift_fresh", "_to_copy"),
        *("copy_", "zero_", "fill_", "masked_fill_", "normal_", "uniform_", "random_"),
        *("bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""Operations that run on local rows, in addition to element-wise operations."""

NEW = frozenset(f"aten::{name}" for name in ("new_zeros", "new_ones", "new_empty", "new_full"))
"""Operations whose result has the tensor's placement if the requested shape equals its shape."""


class Dealt(Shard):
    """The placement of a tensor whose rows are dealt. See [Note: dealt placements]."""

    deal: Deal
    was_made: ClassVar[bool] = False  # a fast check for programs without dealt parameters

    def __new__(cls, dim: int, deal: Deal) -> Dealt:
        return super().__new__(cls, dim)  # type: ignore[call-arg]  # no ``__new__`` in torch's stub

    def __init__(self, dim: int, deal: Deal) -> None:
        super().__init__(dim)
        self.deal = deal
        Dealt.was_made = True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dealt):
            return self.dim == other.dim and self.deal == other.deal
        return isinstance(other, Shard) and other.dim == self.dim

    def __hash__(self) -> int:
        raise UnsupportedError(
            "FS232",
            f"{self!r}: torch's own functions (from_local) created a DTensor that "
            f"{self.deal.asked_by}. Pass them other placements, such as Shard(0).",
        )

    def __repr__(self) -> str:
        deal = self.deal
        if deal.owner is not None:
            return f"Dealt(owner={deal.owner})"
        return f"Dealt(dim={self.dim}, block={deal.block}, first={deal.first})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, tuple[int, ...]]:
        return dealt, (self.dim, self.deal.block, self.deal.first, *self.deal.ends)

    # Methods that torch calls on a shard's placement.

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        start, rows = rows_of(curr_local_size, num_chunks, int(rank), self.deal)
        return rows, start

    def _split_tensor(self, tensor: Tensor, num_chunks: int, **_: Any) -> Any:
        raise UnsupportedError(
            "FS232",
            f"torch's own functions cannot distribute a tensor of shape {tuple(tensor.shape)} that "
            f"{self.deal.asked_by}. Pass them other placements, such as Shard(0), or use "
            "fsdp2.checkpoint, which loads full tensors.",
        )

    def _select_split_tensor(
        self,
        tensor: Tensor,
        num_chunks: int,
        index: Any,
        *,
        clone: bool = True,
        **_: Any,
    ) -> Tensor:
        length = tensor.shape[self.dim]
        rows = tensor.narrow(self.dim, *rows_of(length, num_chunks, int(index), self.deal))
        return rows.clone(memory_format=torch.contiguous_format) if clone else rows

    def _to_replicate_tensor(
        self,
        local_tensor: Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        shape: Sequence[Any],
    ) -> Tensor:
        return _join(local_tensor, shape, mesh, mesh_dim, self)


def dealt(dim: int, block: int, first: int, *ends: int) -> Dealt:
    """Create a placement from ints. Pickles of placements refer only to this function."""
    return Dealt(dim, Deal(block, first, ends))


def deal_in(placement: Placement) -> Deal | None:
    """Return the deal of a ``Dealt`` placement; None for other placements."""
    return placement.deal if isinstance(placement, Dealt) else None


def are_same(first: Sequence[Placement], second: Sequence[Placement]) -> bool:
    """Return True if placements and deals are equal. See [Note: dealt placements]."""
    return key_of(first) == key_of(second)


def dealt_axis(placements: Sequence[Placement]) -> int | None:
    return next((axis for axis, one in enumerate(placements) if isinstance(one, Dealt)), None)


def key_of(placements: Sequence[Placement]) -> tuple[object, ...]:
    return tuple(("dealt", p.dim, p.deal) if isinstance(p, Dealt) else p for p in placements)


def adopt(tensor: object) -> None:
    """Convert a plain DTensor with dealt placements to a ``DealtTensor``, in place."""
    if type(tensor) is DTensor and dealt_axis(tensor.placements) is not None:
        tensor.__class__ = DealtTensor


def _join(
    local: Tensor,
    shape: Sequence[int],
    mesh: DeviceMesh,
    axis: int,
    placement: Dealt,
) -> Tensor:
    """All-gather the rows of an axis into a tensor of ``shape``, as bytes, because not every
    backend supports every dtype. Collective over the axis."""
    group, owner = mesh.get_group(axis), placement.deal.owner
    plain = torch.contiguous_format
    is_alone = not isinstance(group, dist.ProcessGroup) or mesh.size(axis) == 1
    if owner is not None or is_alone:
        mine = is_alone or mesh.get_local_rank(axis) == owner
        # a copy, so that writes to the full tensor do not change the shard
        whole = local.clone(memory_format=plain) if mine else local.new_empty(tuple(shape))
        if not is_alone:
            dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=owner)
        return whole
    dim, size = placement.dim, mesh.size(axis)
    most = most_rows(shape[dim], size, placement.deal)
    # one collective of equal parts, each padded to the longest
    padded = [*shape[:dim], most, *shape[dim + 1 :]]
    own = local.new_zeros(padded)
    own.narrow(dim, 0, local.shape[dim]).copy_(local)
    gathered = local.new_empty((size, *padded))
    sent = own.view(-1).view(torch.uint8)
    torch_comm.all_gather_single(gathered.view(-1).view(torch.uint8), sent, group)
    parts = [
        gathered[rank].narrow(dim, 0, rows_of(shape[dim], size, rank, placement.deal)[1])
        for rank in range(size)
    ]
    return torch.cat(parts, dim)


def _new(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DealtTensor:
    return DealtTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]  # torch's own


class DealtTensor(DTensor):
    """A DTensor whose rows are dealt to the ranks of one axis in whole blocks."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # an attribute in torch's stub
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in args:
            adopt(value)
        name: str = func._schema.name
        if name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")):
            return _of_lists(func, name, args, kwargs)
        like = next((a for a in args if isinstance(a, DealtTensor)), None)
        found: Any = NotImplemented
        if like is not None and name in NEW:
            if tuple(args[1]) == tuple(like.shape):
                shape = like._local_tensor.shape
                found = like._made(func(like._local_tensor, shape, *args[2:], **kwargs))
        elif like is not None and _is_element_wise(func):
            found = _element_wise(func, like, args, kwargs)
        elif like is not None and name == "aten::linalg_vector_norm":
            found = _norm(func, like, args, kwargs)
        elif like is not None and func.is_view and like.is_plain:
            found = _view(func, like, args, kwargs)
        return _on_whole(func, args, kwargs) if found is NotImplemented else found

    @property
    def axis(self) -> int:
        return cast(int, dealt_axis(self._spec.placements))

    @property
    def placement(self) -> Dealt:
        return cast(Dealt, self._spec.placements[self.axis])

    @property
    def owner(self) -> int | None:
        """The rank that has all rows, by its index on the axis; None if rows are divided."""
        return self.placement.deal.owner

    @property
    def is_plain(self) -> bool:
        """Return True if no axis except the dealt one divides the tensor."""
        others = [p for axis, p in enumerate(self._spec.placements) if axis != self.axis]
        return all(p.is_replicate() for p in others)

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for tensors that one operation can process together."""
        spec = self._spec
        return id(spec.mesh), key_of(spec.placements)

    def lies_like(self, other: DealtTensor) -> bool:
        mine, its = self._spec, other._spec
        is_there = mine.mesh == its.mesh and other.shape == self.shape
        return is_there and are_same(mine.placements, its.placements)

    def _made(self, local: Tensor) -> DealtTensor:
        """Wrap a local tensor, possibly of another dtype, with this tensor's placement."""
        spec, old = self._spec, cast(TensorMeta, self._spec.tensor_meta)
        if local.dtype != old.dtype:
            meta = TensorMeta(old.shape, old.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return _new(local, spec, requires_grad=False)

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor whose rows are divided among the ranks of the axis."""
        dim, mesh = self.placement.dim, self._spec.mesh
        rows = self.shape[dim]
        for axis, placement in enumerate(self._spec.placements):
            if axis != self.axis and getattr(placement, "dim", None) == dim:
                _, rows = chunk_of(rows, mesh.size(axis), mesh.get_local_rank(axis))
        local = self._local_tensor.shape
        return (*local[:dim], rows, *local[dim + 1 :])

    @property
    def span(self) -> tuple[int, int]:
        """This rank's first row on the dealt axis, and its number of rows."""
        mesh, placement = self._spec.mesh, self.placement
        length, place = self._whole_shape[placement.dim], mesh.get_local_rank(self.axis)
        return rows_of(length, mesh.size(self.axis), place, placement.deal)

    def replicated(self) -> DTensor:
        """Replicate the tensor over the dealt axis; other axes are unchanged. Collective."""
        spec = self._spec
        placements = [Replicate() if isinstance(p, Dealt) else p for p in spec.placements]
        local = _join(self._local_tensor, self._whole_shape, spec.mesh, self.axis, self.placement)
        made = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return DTensor(local, made, requires_grad=False)

    def rows_of(self, value: object) -> Any:
        """For an operation on this tensor, return this rank's part of another operand."""
        if not isinstance(value, Tensor):
            return value
        adopt(value)
        if isinstance(value, DealtTensor):
            if self.lies_like(value):
                return value._local_tensor
            value = value.replicated()
        if isinstance(value, DTensor):
            if value.dim() == 0:
                return value.full_tensor()
            placements = [
                Replicate() if axis == self.axis or value.dim() < self.dim() else placement
                for axis, placement in enumerate(self._spec.placements)
            ]
            value = value.redistribute(self._spec.mesh, placements).to_local()
        elif value.shape == self.shape and not self.is_plain:
            return NotImplemented  # ``value`` is plain, but other axes divide this tensor
        dim = self.placement.dim - (self.dim() - value.dim())  # shapes broadcast from the right
        return value if dim < 0 or value.shape[dim] == 1 else value.narrow(dim, *self.span)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        if not torch.is_grad_enabled() or not self.requires_grad:
            return self._local_tensor
        return cast(Tensor, _ToLocal.apply(self))  # type: ignore[no-untyped-call]  # torch's own

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        return self._on_all().full_tensor(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        mesh = device_mesh or self._spec.mesh
        wanted = tuple(placements or self._spec.placements)
        if mesh == self._spec.mesh and are_same(wanted, self._spec.placements):
            return self
        return redistribute(self._on_all(), mesh, wanted, **kwargs)

    def _on_all(self) -> DTensor:
        if not torch.is_grad_enabled() or not self.requires_grad:
            return self.replicated()
        return cast(DTensor, _Replicate.apply(self))  # type: ignore[no-untyped-call]  # torch's own

    @staticmethod
    def __tensor_unflatten__(
        inner: Any,
        context: Any,
        size: Any,
        stride: Any,
    ) -> Any:
        made = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return _new(made._local_tensor, made._spec, requires_grad=made.requires_grad)


# Allow weights_only loads of states that contain a DealtTensor, as torch does for its DTensor.
torch.serialization.add_safe_globals([dealt, DealtTensor])


def redistribute(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    **kwargs: Any,
) -> DTensor:
    """Like ``DTensor.redistribute``, including dealt placements. Collective."""
    axis = dealt_axis(placements)
    if axis is None or isinstance(tensor, DealtTensor):
        return tensor.redistribute(mesh, placements, **kwargs)
    others = [Replicate() if isinstance(p, Dealt) else p for p in placements]
    whole = tensor.redistribute(mesh, others, **kwargs)
    return own_part(whole, placements)


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    others = [Replicate() if isinstance(p, Dealt) else p for p in placements]
    whole = distribute_tensor(tensor, mesh, others, src_data_rank=None)
    return whole if dealt_axis(placements) is None else own_part(whole, placements)


def place_like(param: DTensor, entry: dict[Any, Any]) -> None:
    """Redistribute loaded states, ordered by name, to their parameter's placements. Collective."""
    for key in sorted(entry, key=str):
        value = entry[key]
        if isinstance(value, DTensor) and value.dim() and value.device_mesh == param.device_mesh:
            adopt(value)
            if not are_same(value.placements, param.placements):
                entry[key] = redistribute(value, param.device_mesh, param.placements)


def own_part(whole: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return a dealt tensor with this rank's rows of a DTensor replicated over the dealt axis."""
    axis = cast(int, dealt_axis(placements))
    mesh, placement = whole.device_mesh, cast(Dealt, placements[axis])
    ranks, place = mesh.size(axis), mesh.get_local_rank(axis)
    # a copy, because the full tensor may belong to the user
    local = placement._select_split_tensor(whole._local_tensor.detach(), ranks, place)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=whole._spec.tensor_meta)
    return _new(local, spec, requires_grad=False)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DealtTensor) -> Tensor:
        ctx.made = tensor._made
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return cast(Tensor, ctx.made(grad.contiguous()))


class _Replicate(torch.autograd.Function):
    """Replicate a tensor. Ranks must then compute equal results, as with torch's ``Replicate``."""

    @staticmethod
    def forward(ctx: Any, tensor: DealtTensor) -> DTensor:
        ctx.mesh, ctx.placements = tensor._spec.mesh, tensor._spec.placements
        return tensor.replicated()

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return redistribute(grad, ctx.mesh, ctx.placements)


def _is_element_wise(func: Any) -> bool:
    """Return True for an operation that computes each element from elements at the same index."""
    name = func._schema.name
    return name in MADE_ALIKE or (torch.Tag.pointwise in func.tags and name != "aten::equal")


def _element_wise(
    func: Any,
    like: DealtTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation on this rank's rows. Return NotImplemented if it needs the full tensors."""
    schema = func._schema
    if schema.is_mutable and not isinstance(args[0], DealtTensor):
        return NotImplemented
    template = args[0] if isinstance(args[0], DealtTensor) else like
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if any(a.dim() > template.dim() for a in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(a.shape for a in tensors))
    if tuple(shape) != tuple(template.shape):
        return NotImplemented
    own = [template.rows_of(a) for a in args]
    named = {key: template.rows_of(a) for key, a in kwargs.items()}
    if any(a is NotImplemented for a in (*own, *named.values())):
        return NotImplemented
    found = func(*own, **named)
    if schema.is_mutable:
        return args[0]
    if isinstance(found, tuple | list):
        return type(found)(template._made(one) for one in found)
    return template._made(found)


def _view(
    func: Any,
    like: DealtTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """View each rank's local memory, so that writes to the view change the tensor. If one rank owns
    all rows, any view is supported; otherwise only views that treat all rows identically. Return
    NotImplemented for other views, and for 0-dim views, which cannot be empty on a rank."""
    meta = cast(TensorMeta, like._spec.tensor_meta)
    if args[0] is not like:
        return NotImplemented
    outline = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    wanted = func(outline, *args[1:], **kwargs)
    shapes = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    mesh, local, axis = like._spec.mesh, like._local_tensor, like.axis
    placements = list(like._spec.placements)
    if any(one.dim() == 0 for one in shapes):
        return NotImplemented
    if func._schema.name == "aten::view" and list(args[1:2]) == [[*like.shape]]:
        return _new(local.view_as(local), like._spec)
    if like.owner is None:
        dim = _dim_in_view(func, like, args, kwargs)
        if dim is None:
            return NotImplemented
        placements[axis] = Dealt(dim, like.placement.deal)
    if like.owner is None or mesh.get_local_rank(axis) == like.owner:
        found = func(local, *args[1:], **kwargs)
        locals_ = list(found) if isinstance(found, tuple | list) else [found]
    else:
        locals_ = [local.new_empty((0, *one.shape[1:]), dtype=one.dtype) for one in shapes]
    made = []
    for one, part in zip(shapes, locals_, strict=True):
        own = TensorMeta(one.shape, one.stride(), one.dtype)
        made.append(_new(part, DTensorSpec(mesh, tuple(placements), tensor_meta=own)))
    return type(wanted)(made) if isinstance(wanted, tuple | list) else made[0]


def _dim_in_view(
    func: Any,
    like: DealtTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int | None:
    """Return the dim of the divided rows in a view, or None unless it treats all rows identically.
    Views meta tensors with added rows: only this dim may grow, and by the number of added rows."""
    dim, sizes = like.placement.dim, list(like.shape)
    if func._schema.name == "aten::diagonal":  # keeps the number of rows, but shifts each row
        return None
    shapes = []
    for more in (0, 1, 2):
        sizes[dim] = like.shape[dim] + more
        try:
            found = func(torch.empty(sizes, dtype=like.dtype, device="meta"), *args[1:], **kwargs)
        except (RuntimeError, IndexError):  # not possible with this number of rows
            return None
        if not isinstance(found, Tensor):
            return None
        shapes.append(tuple(found.shape))
    for place, rows in enumerate(zip(*shapes, strict=False)):
        grows = [rows[0] + more for more in (0, 1, 2)] == list(rows)
        if grows and rows[0] == like.shape[dim]:
            rest = {shape[:place] + shape[place + 1 :] for shape in shapes}
            return place if len(rest) == 1 else None
    return None


def _norm(
    func: Any,
    like: DealtTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return, on every rank, the norm of all elements, computed from the norms of ranks' rows."""
    if args[0] is not like or any(rest is not None and rest is not False for rest in args[2:]):
        return NotImplemented

    def of_each(local: list[Tensor], *rest: Any, **options: Any) -> list[Tensor]:
        return [func(one, *rest, **options) for one in local]

    return _norms(of_each, [like], args, kwargs)[0]


def _none(like: DealtTensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of an empty tensor."""
    real = dtype.to_real() if dtype.is_complex else dtype
    nothing = float("inf") if order < 0 else 0.0
    return like._local_tensor.new_full((), nothing, dtype=real)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on replicated DTensors. Collective."""
    if func.is_view:
        deal = next(a.placement.deal for a in args if isinstance(a, DealtTensor))
        raise UnsupportedError(
            "FS232",
            f"{func}: found a tensor that {deal.asked_by}. It does not support this view, because "
            "writes to the view would be lost. Use full_tensor() or to_local().",
        )
    made: dict[int, DTensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, DealtTensor):
            if id(value) not in made:
                made[id(value)] = value.replicated()
            return made[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(map(whole, value))
        return value

    found = func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
    if not func._schema.is_mutable:
        return found
    written = [*args, *kwargs.values()]
    for value in written:
        if isinstance(value, DealtTensor):
            # every rank computed the same result; keep this rank's rows
            new = own_part(made[id(value)], value._spec.placements)
            value._local_tensor.copy_(new._local_tensor)
    back = {id(one): value for value in written for one in [made.get(id(value))] if one is not None}
    return back.get(id(found), found)


def _of_lists(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a list operation separately for each group of entries with equal keys. An entry's key is
    the key of its written tensor or, if nothing is written, of its first dealt tensor."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a]
    count, is_mutable = len(lists[0]), func._schema.is_mutable
    for one in lists:
        for value in one:
            adopt(value)
    looked_at = [one for one in lists if len(one) == count][: 1 if is_mutable else None]
    likes = [
        next((one for one in beside if isinstance(one, DealtTensor)), None)
        for beside in zip(*looked_at, strict=True)
    ]
    of_key: dict[object, list[int]] = {}
    for index, like in enumerate(likes):
        of_key.setdefault(None if like is None else like.key, []).append(index)
    results: dict[int, Any] = {}
    for indices in of_key.values():

        def chosen(value: Any, indices: list[int] = indices) -> Any:
            is_list = isinstance(value, list | tuple) and len(value) == count
            return [value[index] for index in indices] if is_list else value

        some = [chosen(a) for a in args]
        named = {key: chosen(a) for key, a in kwargs.items()}
        found = _of_one_key(func, name, chosen(likes), some, named)
        if not is_mutable:
            results.update(zip(indices, found, strict=True))
    return None if is_mutable else [results[index] for index in range(count)]


def _of_one_key(
    func: Any,
    name: str,
    likes: list[Any],
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation on lists of tensors with the deal of ``likes``, or, if these are None, on
    full tensors."""
    first = likes[0]
    if first is not None:
        _check_outputs(func, likes, args)
        if name == "aten::_foreach_norm":
            return _norms(func, likes, args, kwargs)

    def own(value: Any) -> Any:
        if isinstance(value, list) and len(value) == len(likes):
            return [_part_for(like, one) for like, one in zip(likes, value, strict=True)]
        return _part_for(first, value) if isinstance(value, DTensor) else value

    found = func(*map(own, args), **{key: own(value) for key, value in kwargs.items()})
    if first is None or func._schema.is_mutable:
        if first is not None and name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            mesh = first._spec.mesh
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:  # either all ranks skip the step, or none does
                    dist.all_reduce(args[1], dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return found
    return [like._made(one) for like, one in zip(likes, found, strict=True)]


def _part_for(like: DealtTensor | None, value: Any) -> Any:
    if like is None:
        return value.replicated() if isinstance(value, DealtTensor) else value
    return like.rows_of(value)


def _check_outputs(func: Any, likes: list[DealtTensor], args: list[Any]) -> None:
    for argument, one in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(one, list) and len(one) == len(likes):
            for like, value in zip(likes, one, strict=True):
                if not isinstance(value, DealtTensor) or not like.lies_like(value):
                    raise UnsupportedError(
                        "FS232",
                        f"{func._schema.name}: found an output whose placements differ from those "
                        f"of an input that {like.placement.deal.asked_by}. Redistribute the output "
                        "first: other.redistribute(placements=param.placements).",
                    )


def _norms(
    func: Callable[..., Any],
    likes: list[DealtTensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[Tensor]:
    """Return the norms of tensors with the same deal, in one collective."""
    order, like = args[1] if len(args) > 1 else kwargs.get("ord", 2), likes[0]
    dtype = kwargs.get("dtype") or next(iter(args[2:]), None)  # by position in lists' operation
    if not all(like.is_plain for like in likes) or (like.owner is None and not order):
        return [torch.linalg.vector_norm(one.replicated(), order, dtype=dtype) for one in likes]
    local = [like._local_tensor for like in likes]
    some = [index for index, one in enumerate(local) if one.numel()]
    norms = [_none(like, order, dtype or like.dtype) for like in likes]
    if some:
        found = func([local[index] for index in some], *args[1:], **kwargs)
        for index, norm in zip(some, found, strict=True):
            norms[index] = norm
    joined, mesh, axis = torch.stack(norms), like._spec.mesh, like.axis
    if like.owner is not None:
        joined = _join(joined, joined.shape, mesh, axis, like.placement)
    else:
        every = (mesh.size(axis), len(norms))
        rows = _join(joined.unsqueeze(0), every, mesh, axis, Dealt(0, Deal(1)))
        joined = torch.linalg.vector_norm(rows, order, dim=0)
    meta = TensorMeta(torch.Size(()), (), joined.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return [DTensor(value, spec, requires_grad=False) for value in joined.unbind()]
