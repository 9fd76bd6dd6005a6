"""Private torch API, by subject: a DTensor that one rank of an axis has whole, and the others not.

Torch's DTensor knows chunks of equal size only, and its rules for operations make a plain ``Shard``
of any other placement. So such a tensor is a subclass, whose operations are done here: what works
element by element is done where the elements are; a view is one of the owner's memory; anything
else is done on a DTensor that every rank has whole. Tried on torch 2.12.1, 2.13.0 and 2.14.1; torch
2.11 does not ask a subclass. Nothing here knows what a unit or a group is.

[Note: owned placements]
``OwnedBy`` is a ``Shard(0)`` that answers torch's own question of where rows begin, so that
checkpoints, and whatever else asks it, get right offsets. Torch's specs insist that a shard equals
``Shard(dim)``, so it does; owners tell two of them apart. No operation of torch's own may see one:
they all come to ``OwnedTensor`` first. Torch itself can make a plain DTensor with such placements
(``from_local``, and states that its helpers load). For that one torch would compute with chunks of
wrong sizes, in silence. But it looks every operation up by a hash of the placements first, and that
is an error here. Where we see such a tensor, we make an ``OwnedTensor`` of it (``adopt``).
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

from fsdp2._base.errors import UnsupportedError

MADE_ALIKE = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "clone", "detach", "alias", "lift_fresh", "_to_copy"),
        *("copy_", "zero_", "fill_", "masked_fill_", "normal_", "uniform_", "random_"),
        *("bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""Operations beside the element-wise ones that are done where the elements are."""

NEW = frozenset(f"aten::{name}" for name in ("new_zeros", "new_ones", "new_empty", "new_full"))
"""Operations whose result lies like the tensor, if it is asked for in the same shape."""


class OwnedBy(Shard):
    """The placement of a tensor that the rank ``owner`` of an axis has whole.

    See [Note: owned placements].
    """

    owner: int
    was_made: ClassVar[bool] = False  # a look that costs nothing to who has none

    def __new__(cls, owner: int) -> OwnedBy:
        return super().__new__(cls, 0)  # type: ignore[call-arg]  # torch's stub lacks it

    def __init__(self, owner: int) -> None:
        super().__init__(0)
        self.owner = owner
        OwnedBy.was_made = True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OwnedBy):
            return self.owner == other.owner
        return isinstance(other, Shard) and other.dim == 0

    def __hash__(self) -> int:
        raise UnsupportedError(
            "FS232",
            f"{self!r}: torch computes with a DTensor that is placed so that one rank has it whole "
            "(fsdp2.Whole), and was made by torch's own functions (from_local). "
            "Give it placements of its own, such as Shard(0).",
        )

    def __repr__(self) -> str:
        return f"OwnedBy({self.owner})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[OwnedBy], tuple[int]]:
        return OwnedBy, (self.owner,)

    # What torch asks a shard: where its rows begin, and what a rank has of a whole tensor.

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        return (curr_local_size, 0) if rank == self.owner else (0, curr_local_size)

    def _split_tensor(
        self,
        tensor: Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> Any:
        raise UnsupportedError(
            "FS232",
            f"torch's own functions cannot distribute a tensor of shape {tuple(tensor.shape)} so "
            f"that rank {self.owner} of an axis has it whole (fsdp2.Whole). Give them "
            "placements of their own (Shard(0)), or use fsdp2.checkpoint, which loads whole "
            "tensors.",
        )

    def _select_split_tensor(
        self,
        tensor: Tensor,
        num_chunks: int,
        index: Any,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
        clone: bool = True,
    ) -> Tensor:
        rows = tensor if index == self.owner else tensor[:0]
        return rows.clone() if clone else rows

    def _to_replicate_tensor(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[Any]
    ) -> Tensor:
        return _from_owner(local_tensor, shape, mesh, mesh_dim, self.owner)


def owner_in(placement: Placement) -> int | None:
    """Return the rank of the axis that has all rows; None: there is none."""
    return placement.owner if isinstance(placement, OwnedBy) else None


def are_same(first: Sequence[Placement], second: Sequence[Placement]) -> bool:
    """True if placements are equal, and owners too. See [Note: owned placements]."""
    return tuple(first) == tuple(second) and [*map(owner_in, first)] == [*map(owner_in, second)]


def owned_axis(placements: Sequence[Placement]) -> int | None:
    """Return the axis on which one rank has all rows; None if there is none."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, OwnedBy):
            return axis
    return None


def key_of(placements: Sequence[Placement]) -> tuple[object, ...]:
    """Return what stands for placements in the key of a dict."""
    return tuple(("owner", p.owner) if isinstance(p, OwnedBy) else p for p in placements)


def adopt(tensor: object) -> None:
    """Let a plain DTensor with owned placements be what it is, the same object."""
    if type(tensor) is DTensor and owned_axis(tensor.placements) is not None:
        tensor.__class__ = OwnedTensor


def _from_owner(
    local: Tensor, shape: Sequence[int], mesh: DeviceMesh, axis: int, owner: int
) -> Tensor:
    """Return what the owner has, on every rank of the axis. Collective over it."""
    group = mesh.get_group(axis)
    mine = mesh.get_local_rank(axis) == owner
    # a copy: what is whole must not change with the shard, nor the shard with it
    plain = torch.contiguous_format
    whole = local.clone(memory_format=plain) if mine else local.new_empty(tuple(shape))
    if isinstance(group, dist.ProcessGroup) and mesh.size(axis) > 1:
        # as bytes: not every backend has every dtype
        dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=owner)
    return whole


def _new(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> OwnedTensor:
    return OwnedTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]  # torch's own


class OwnedTensor(DTensor):
    """A DTensor that the owner of one axis has whole; the local tensors of the others are empty."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has an attribute
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
        like = next((a for a in args if isinstance(a, OwnedTensor)), None)
        if like is not None and name in NEW:
            if tuple(args[1]) == tuple(like.shape):
                shape = like._local_tensor.shape
                return like._made(func(like._local_tensor, shape, *args[2:], **kwargs))
        elif like is not None and _is_element_wise(func):
            local = _element_wise(func, like, args, kwargs)
            if local is not NotImplemented:
                return local
        elif like is not None and name == "aten::linalg_vector_norm" and like.is_plain:
            found = _norm(func, like, args, kwargs)
            if found is not NotImplemented:
                return found
        elif like is not None and func.is_view and like.is_plain:
            found = _view(func, like, args, kwargs)
            if found is not NotImplemented:
                return found
        return _on_whole(func, args, kwargs)

    # How it lies.

    @property
    def axis(self) -> int:
        axis = owned_axis(self._spec.placements)
        assert axis is not None
        return axis

    @property
    def owner(self) -> int:
        """The rank of the axis that has all of it."""
        return cast(OwnedBy, self._spec.placements[self.axis]).owner

    @property
    def is_plain(self) -> bool:
        """True if no other axis divides it."""
        others = [p for axis, p in enumerate(self._spec.placements) if axis != self.axis]
        return all(p.is_replicate() for p in others)

    @property
    def key(self) -> tuple[object, ...]:
        """What tensors have in common that can be worked on together."""
        spec = self._spec
        return id(spec.mesh), key_of(spec.placements)

    def lies_like(self, other: OwnedTensor) -> bool:
        mine, its = self._spec, other._spec
        is_there = mine.mesh is its.mesh or mine.mesh == its.mesh
        return is_there and other.shape == self.shape and are_same(mine.placements, its.placements)

    def _made(self, local: Tensor) -> OwnedTensor:
        """Wrap a local tensor of another dtype, perhaps, that lies as this one does."""
        spec, old = self._spec, self._spec.tensor_meta
        assert old is not None
        if local.dtype != old.dtype:
            meta = TensorMeta(old.shape, old.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return _new(local, spec, requires_grad=False)

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        """Shape of what the owner has."""
        local, rows = self._local_tensor.shape, self.shape[0]
        mesh = self._spec.mesh
        for axis, placement in enumerate(self._spec.placements):
            is_cut = not placement.is_replicate() and not placement.is_partial()
            if axis != self.axis and is_cut and getattr(placement, "dim", None) == 0:
                chunk = -(-rows // mesh.size(axis))
                start = min(mesh.get_local_rank(axis) * chunk, rows)
                rows = min(chunk, rows - start)
        return (rows, *local[1:])

    def replicated(self) -> DTensor:
        """Return it whole on every rank of its axis, and as it is on the others. Collective."""
        spec = self._spec
        assert spec.tensor_meta is not None
        placements = [Replicate() if isinstance(p, OwnedBy) else p for p in spec.placements]
        shape, mesh = self._whole_shape, spec.mesh
        local = _from_owner(self._local_tensor, shape, mesh, self.axis, self.owner)
        made = DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)
        return DTensor(local, made, requires_grad=False)

    def rows_of(self, value: object) -> Any:
        """Return this rank's part of a value that takes part in an operation beside this one."""
        if not isinstance(value, Tensor):
            return value
        adopt(value)
        if isinstance(value, OwnedTensor):
            if self.lies_like(value):
                return value._local_tensor
            value = value.replicated()
        mine = self._spec.mesh.get_local_rank(self.axis) == self.owner
        if isinstance(value, DTensor):
            if value.dim() == 0:
                return value.full_tensor()
            placements = [
                Replicate() if axis == self.axis or value.dim() < self.dim() else placement
                for axis, placement in enumerate(self._spec.placements)
            ]
            value = value.redistribute(self._spec.mesh, placements).to_local()
        elif value.shape == self.shape and not self.is_plain:
            return NotImplemented  # plain, and beside it this one is divided over other axes
        if value.dim() < self.dim() or mine or value.shape[0] == 1:
            return value
        return value[:0]

    # What users of a DTensor call.

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
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        made = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return _new(made._local_tensor, made._spec, requires_grad=made.requires_grad)


# A state that holds one loads with weights_only, as one of torch's own DTensors does.
torch.serialization.add_safe_globals([OwnedBy, OwnedTensor])


def redistribute(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], **kwargs: Any
) -> DTensor:
    """Do what ``DTensor.redistribute`` does, also to owned placements. Collective."""
    axis = owned_axis(placements)
    if axis is None or isinstance(tensor, OwnedTensor):
        return tensor.redistribute(mesh, placements, **kwargs)
    others = [Replicate() if isinstance(p, OwnedBy) else p for p in placements]
    whole = tensor.redistribute(mesh, others, **kwargs)
    return own_part(whole, placements)


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Place a tensor that every rank has whole."""
    others = [Replicate() if isinstance(p, OwnedBy) else p for p in placements]
    whole = distribute_tensor(tensor, mesh, others, src_data_rank=None)
    return whole if owned_axis(placements) is None else own_part(whole, placements)


def place_like(param: DTensor, entry: dict[Any, Any]) -> None:
    """Let the states of a parameter lie as it does, whoever loaded them. Collective if they do not.

    Ranks take them in one order, by name.
    """
    for key in sorted(entry, key=str):
        value = entry[key]
        if isinstance(value, DTensor) and value.dim() and value.device_mesh == param.device_mesh:
            adopt(value)
            if not are_same(value.placements, param.placements):
                entry[key] = redistribute(value, param.device_mesh, param.placements)


def own_part(whole: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return the owned tensor of a DTensor that every rank of the owner's axis has whole."""
    axis = owned_axis(placements)
    assert axis is not None
    mesh, meta = whole.device_mesh, whole._spec.tensor_meta
    assert meta is not None
    local = whole._local_tensor.detach()
    if mesh.get_local_rank(axis) != cast(OwnedBy, placements[axis]).owner:
        local = local[:0]
    local = local.clone(memory_format=torch.contiguous_format)  # the whole may be the user's
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return _new(local, spec, requires_grad=False)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: OwnedTensor) -> Tensor:
        ctx.made = tensor._made
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        made: Tensor = ctx.made(grad.contiguous())
        return made


class _Replicate(torch.autograd.Function):
    """Whole on all ranks; ranks are taken to compute the same of it, as torch's own does."""

    @staticmethod
    def forward(ctx: Any, tensor: OwnedTensor) -> DTensor:
        ctx.mesh, ctx.placements = tensor._spec.mesh, tensor._spec.placements
        return tensor.replicated()

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return redistribute(grad, ctx.mesh, ctx.placements)


# Operations.


def _is_element_wise(func: Any) -> bool:
    """True for an operation that makes or changes each element of the elements at its place."""
    name = func._schema.name
    return name in MADE_ALIKE or (torch.Tag.pointwise in func.tags and name != "aten::equal")


def _element_wise(
    func: Any, like: OwnedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do an operation on what this rank has; NotImplemented if that is not what was asked for."""
    schema = func._schema
    if schema.is_mutable and not isinstance(args[0], OwnedTensor):
        return NotImplemented
    template = args[0] if isinstance(args[0], OwnedTensor) else like
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


def _view(func: Any, like: OwnedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View the owner's memory: what is written there stays. On the others views have no rows.

    NotImplemented for a view of no dims, which has no rows to leave out.
    """
    meta = like._spec.tensor_meta
    assert meta is not None
    if args[0] is not like:
        return NotImplemented
    outline = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    wanted = func(outline, *args[1:], **kwargs)
    shapes = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    if any(one.dim() == 0 for one in shapes):
        return NotImplemented
    mesh, placements, local = like._spec.mesh, like._spec.placements, like._local_tensor
    if mesh.get_local_rank(like.axis) == like.owner:
        found = func(local, *args[1:], **kwargs)
        locals_ = list(found) if isinstance(found, tuple | list) else [found]
    else:
        locals_ = [local.new_empty((0, *one.shape[1:]), dtype=one.dtype) for one in shapes]
    made = []
    for one, part in zip(shapes, locals_, strict=True):
        own = TensorMeta(one.shape, one.stride(), one.dtype)
        made.append(_new(part, DTensorSpec(mesh, placements, tensor_meta=own)))
    return type(wanted)(made) if isinstance(wanted, tuple | list) else made[0]


def _norm(func: Any, like: OwnedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the norm of all elements: that of the owner's, on every rank."""
    rest = args[2:]
    if any(r is not None and r is not False for r in rest) or args[0] is not like:
        return NotImplemented
    local = like._local_tensor
    norm = func(local, *args[1:], **kwargs) if local.numel() else _none(like, kwargs)
    return _scalar(like, _from_owner(norm, (), like._spec.mesh, like.axis, like.owner))


def _none(like: OwnedTensor, kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or like.dtype
    real = dtype.to_real() if dtype.is_complex else dtype
    return like._local_tensor.new_zeros((), dtype=real)


def _scalar(like: OwnedTensor, value: Tensor) -> DTensor:
    """Return a number that every rank has as a DTensor."""
    mesh = like._spec.mesh
    meta = TensorMeta(torch.Size(()), (), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(value, spec, requires_grad=False)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on DTensors that every rank has whole. Collective."""
    if func.is_view:
        raise UnsupportedError(
            "FS232",
            f"{func}: found a tensor that one rank has whole (fsdp2.Whole), of which there is no "
            "such view: what is written to it would be lost. Use full_tensor(), or to_local() on "
            "its owner.",
        )
    made: dict[int, DTensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, OwnedTensor):
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
        if isinstance(value, OwnedTensor):
            # every rank did the same; the owner alone has room for it
            new = own_part(made[id(value)], value._spec.placements)
            value._local_tensor.copy_(new._local_tensor)
    back = {id(one): value for value in written for one in [made.get(id(value))] if one is not None}
    return back.get(id(found), found)


def _of_lists(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on lists of tensors: on those that lie alike together.

    What is written to decides how: beside a tensor that is not owned, owned ones are made whole.
    """
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a]
    count = len(lists[0])
    for one in lists:
        for value in one:
            adopt(value)
    is_mutable = func._schema.is_mutable
    of_key: dict[object, list[int]] = {}
    for index in range(count):
        beside = [one[index] for one in lists if len(one) == count]
        looked_at = beside[:1] if is_mutable else beside
        owned = next((one for one in looked_at if isinstance(one, OwnedTensor)), None)
        of_key.setdefault(None if owned is None else owned.key, []).append(index)
    results: list[Any] = [None] * count
    has_results = False
    for key, indices in of_key.items():

        def chosen(value: Any, key: object = key, indices: list[int] = indices) -> Any:
            if isinstance(value, list | tuple) and len(value) == count:
                some = [value[index] for index in indices]
                return some if key is not None else [_whole_of(one) for one in some]
            return value if key is not None else _whole_of(value)

        some = [chosen(a) for a in args]
        named = {name: chosen(a) for name, a in kwargs.items()}
        found = func(*some, **named) if key is None else _of_one_key(func, name, some, named)
        if found is not None:
            has_results = True
            for index, one in zip(indices, found, strict=True):
                results[index] = one
    return results if has_results else None


def _whole_of(value: Any) -> Any:
    return value.replicated() if isinstance(value, OwnedTensor) else value


def _of_one_key(func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Do it on lists of owned tensors of one owner."""
    first = next(a for a in (*args, *kwargs.values()) if isinstance(a, list))
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list)]
    likes = [
        next(one[i] for one in lists if len(one) == len(first) and isinstance(one[i], OwnedTensor))
        for i in range(len(first))
    ]

    def rows(value: Any) -> Any:
        if isinstance(value, list) and len(value) == len(likes):
            return [like.rows_of(one) for like, one in zip(likes, value, strict=True)]
        return likes[0].rows_of(value) if isinstance(value, DTensor) else value

    for argument, one in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and isinstance(one, list) and len(one) == len(likes):
            for like, value in zip(likes, one, strict=True):
                if not isinstance(value, OwnedTensor) or not like.lies_like(value):
                    raise UnsupportedError(
                        "FS232",
                        f"{name}: is to write to a tensor that lies otherwise than the one beside "
                        "it, which one rank has whole (fsdp2.Whole). Redistribute it first: "
                        "other.redistribute(placements=param.placements) of an owned one.",
                    )
    if name == "aten::_foreach_norm":
        return _norms(func, likes, args, kwargs)
    found = func(*map(rows, args), **{key: rows(value) for key, value in kwargs.items()})
    if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        mesh = likes[0]._spec.mesh
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:  # all ranks skip a step, or none
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if found is None or func._schema.is_mutable:
        return None
    return [like._made(one) for like, one in zip(likes, found, strict=True)]


def _norms(
    func: Callable[..., Any], likes: list[OwnedTensor], args: list[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the norms of tensors of one owner, which sends them to the others at once."""
    if not all(like.is_plain for like in likes):
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return [torch.linalg.vector_norm(like.replicated(), order) for like in likes]
    local = [like._local_tensor for like in likes]
    like = likes[0]
    if like._spec.mesh.get_local_rank(like.axis) == like.owner:
        norms = torch.stack(list(func(local, *args[1:], **kwargs)))
    else:
        norms = torch.stack([_none(one, kwargs) for one in likes])
    norms = _from_owner(norms, norms.shape, like._spec.mesh, like.axis, like.owner)
    return [_scalar(one, value) for one, value in zip(likes, norms.unbind(), strict=True)]
