"""View flat buffers, cast and encode shards for sending, and unpack gathered parameters.

Pure tensor functions that launch a few kernels each. Independent of process groups, streams and
modules. W: size of the shard axis; C: number of bytes (or wire elements) that a rank sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2._core.base import torch_tensors
from fsdp2._core.params.layout import (
    SCALE_DTYPE,
    Coding,
    GatherLayout,
    ShardLayout,
    contiguous_stride,
)

EXPONENTS = (-120, 120)  # limits of a scale's exponent, so that the scale is normal in bf16


class Codes(NamedTuple):
    """An encoded shard: codes in the shard's shape, and scales ``[S]``."""

    codes: Tensor
    scales: Tensor


class Views:
    """Creates views of codes and scales in a byte buffer, with one ``as_strided`` call each."""

    def __init__(self, buffer: Tensor, coding: Coding) -> None:
        self._coding = coding
        whole = buffer.shape[-1] - buffer.shape[-1] % SCALE_DTYPE.itemsize  # drop an odd byte
        self._codes = buffer.view(coding.dtype)
        self._scales = buffer[..., :whole].view(SCALE_DTYPE)
        self._start = buffer.storage_offset()

    def at(
        self,
        start: int,
        shape: Sequence[int],
        room: Sequence[int],
        count: int = 1,
        step: int = 0,
    ) -> Codes:
        """View ``count`` shards of the same shape that begin ``step`` bytes apart, the first at
        byte ``start``: codes ``[n, *shape]`` and scales ``[n, S]``. ``room``: the shape for which
        each shard has memory."""
        begin, size = self._start + start, SCALE_DTYPE.itemsize
        stride = (step, *contiguous_stride(shape))
        codes = self._codes.as_strided((count, *shape), stride, begin)
        begin = (begin + self._coding.scales_start(room)) // size
        scales = (count, self._coding.scale_count(shape)), (step // size, 1)
        return Codes(codes, self._scales.as_strided(*scales, begin))


def encode(rows: Sequence[Tensor], coding: Coding) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return each shard's rows ``[S, elements]`` divided by their scales, and the scales. A row
    with a non-finite element becomes NaN. The caller rounds by copying to the coded dtype."""
    most = torch.finfo(coding.dtype).max
    rows = [one.to(torch.float32) for one in rows]
    counts = [len(one) for one in rows]
    largest = torch.empty(sum(counts), dtype=torch.float32, device=rows[0].device)
    for one, out in zip(rows, largest.split(counts), strict=True):
        torch.linalg.vector_norm(one, math.inf, 1, out=out)
    exponents = torch.frexp(largest / most).exponent.clamp(*EXPONENTS)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.where(largest.isfinite(), scales, math.nan)
    values = torch_tensors.clamped_quotients(rows, scales.unsqueeze(1).split(counts), most)
    return values, list(scales.to(SCALE_DTYPE).split(counts))


def decode(targets: Sequence[Tensor], made: Sequence[Codes]) -> None:
    """Fill each target ``[n, *shape]`` from codes of the same shape and scales ``[n, S]``."""
    codes = [one.codes for one in made]
    # fp16 cannot represent the scales of small fp16 values
    is_half = any(target.dtype is torch.float16 for target in targets)
    values = [one.to(torch.float32) for one in codes] if is_half else list(targets)
    if not is_half:
        torch_tensors.copy_all(targets, codes)
    factors = []
    for value, (_, scales) in zip(values, made, strict=True):
        ones = (1,) * (value.dim() - 2)
        factors.append(scales.to(value.dtype).view(*scales.shape, *ones))
    torch_tensors.scale_all_(values, factors)
    if is_half:
        torch_tensors.copy_all(targets, values)


def typed(buffer: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer[start : start + numel * dtype.itemsize].view(dtype)


def own_shard(shards: Tensor, layout: GatherLayout, index: int, rank: int) -> Tensor:
    """Return a rank's unpadded shard of a parameter. The shard aliases the shard buffer, but has a
    separate storage, so saving or copying it does not include other parameters. Its storage offset
    is 0, which torch requires to copy or pickle a DTensor."""
    item, start = layout.items[index], layout.shard_offsets[index]
    shape = item.shard.shard_shape(rank)
    numel = math.prod(shape)
    if shards.untyped_storage().device.type == "meta" or numel == 0:
        return torch.empty(shape, dtype=item.storage_dtype, device=shards.device)
    end = start + numel * item.storage_dtype.itemsize
    tensor = torch.empty(0, dtype=item.storage_dtype, device=shards.device)
    return tensor.set_(shards.untyped_storage()[start:end], 0, shape, contiguous_stride(shape))


def shard_view(
    shards: Tensor,
    layout: GatherLayout,
    index: int,
    rank: int,
) -> Tensor:
    """View a rank's unpadded shard of a parameter in a shard buffer whose memory may be freed."""
    item, start = layout.items[index], layout.shard_offsets[index]
    shape = item.shard.shard_shape(rank)
    return typed(shards, start, math.prod(shape), item.storage_dtype).view(shape)


def shard_of(tensor: Tensor, shard: ShardLayout, rank: int) -> Tensor:
    if shard.dim is None:
        return tensor
    return tensor.narrow(shard.dim, *shard.span(rank))


def cast_shards(
    shards: Tensor,
    send: Tensor,
    layout: GatherLayout,
    rank: int,
) -> None:
    """Fill the send buffer from the shard buffer, with one kernel per uncoded segment. Encode all
    coded ones together."""
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    scales: list[Tensor] = []
    how = layout.coding
    out = None if how is None else Views(send, how)
    for segment in layout.segments:
        if not segment.is_coded:
            source = typed(shards, segment.shard_start, segment.numel, segment.storage_dtype)
            typed(send, segment.send_start, segment.numel, segment.compute_dtype).copy_(source)
            continue
        index = segment.indices[0]
        item = layout.items[index]
        shape = item.shard.shard_shape(rank)
        if not math.prod(shape):
            continue
        assert how is not None
        assert out is not None
        source = typed(shards, segment.shard_start, math.prod(shape), item.storage_dtype)
        flat = source.view(how.scale_count(shape), -1)
        made = out.at(layout.send_offsets[index], tuple(flat.shape), item.room(rank))
        rows.append(flat)
        targets.append(made.codes[0])
        scales.append(made.scales[0])
    if rows:
        assert how is not None
        values, found = encode(rows, how)
        torch_tensors.copy_all([*targets, *scales], [*values, *found])


def full_tensors(full: Tensor, layout: GatherLayout) -> list[Tensor]:
    """View the unsharded tensors in the full buffer, with their original strides. Writes to the
    buffer do not increment the views' versions, so autograd accepts parameters that were saved
    before a gather."""
    views = []
    for item, start in zip(layout.items, layout.full_offsets, strict=True):
        if item.is_tail:
            continue
        flat = typed(full, start, item.shard.numel, item.compute_dtype)
        views.append(flat.as_strided(item.shard.shape, item.shard.stride).data)
    return views


def gather_targets(
    full: Tensor,
    layout: GatherLayout,
    indices: Sequence[int],
    tail: Tensor | None = None,
) -> list[Tensor]:
    """View the destinations of shards: rows ``[n, C_i]`` in the wire dtype if one copy suffices,
    else the full tensor. ``n`` is from ``ranks_of``. ``tail``: memory that receives the tail."""
    targets = []
    for index in indices:
        item, start = layout.items[index], layout.full_offsets[index]
        if item.shard.dim is None or not item.lands_as_it_is:
            flat = typed(full, start, item.shard.numel, item.compute_dtype)
            targets.append(flat.as_strided(item.shard.shape, item.shard.stride))
        else:
            numel = layout.padded_nbytes(index) // layout.wire_dtype.itemsize
            ranks, memory = layout.ranks_of(index), full
            if item.is_tail and tail is not None:
                memory, start = tail, 0
            flat = typed(memory, start, ranks * numel, layout.wire_dtype)
            targets.append(flat.view(ranks, numel))
    return targets


def landing_in(full: Tensor, layout: GatherLayout) -> Tensor | None:
    """View the part of the full buffer that receives all pieces. None: separate memory does."""
    if layout.landing.start is None:
        return None
    return typed(full, layout.landing.start, layout.landing_numel, layout.wire_dtype)


def pieces_of(landing: Tensor, layout: GatherLayout) -> list[Tensor]:
    itemsize = layout.wire_dtype.itemsize
    return list(landing.split([nbytes // itemsize for nbytes in layout.landing.pieces]))


def even_parts(landing: Tensor, layout: GatherLayout) -> list[Tensor]:
    """View the even parts of the gathered pieces: ``[n, C]`` for each run of ``n`` ranks."""
    itemsize = layout.wire_dtype.itemsize
    width, start, parts = layout.packed_nbytes // itemsize, landing.storage_offset(), []
    for first, count in layout.landing.runs:
        step = layout.landing.pieces[first] // itemsize
        parts.append(landing.as_strided((count, width), (step, 1), start))
        start += count * step
    return parts


def unpack_dealt(landing: Tensor, layout: GatherLayout, targets: Sequence[Tensor]) -> None:
    """Copy gathered rows of dealt parameters into ``targets`` (from ``dealt_targets``)."""
    plain: list[Tensor] = []
    sources: list[Tensor] = []
    coded = Decoding(landing, layout.coding)
    flat = landing.view(torch.uint8)
    for (index, run, start), target in zip(layout.landing.copied, targets, strict=True):
        item = layout.items[index]
        shape, step = item.shard.shard_shape(run.first), layout.landing.pieces[run.first]
        if item.coding is not None:
            coded.add(target, start, shape, step)
            continue
        size = (run.ranks, item.sent_nbytes(run.first))
        rows = flat.as_strided(size, (step, 1), flat.storage_offset() + start)
        plain.append(target)
        sources.append(rows.view(item.compute_dtype).view(run.ranks, *shape))
    if plain:
        torch_tensors.copy_all(plain, sources)
    coded.run()


def dealt_targets(full: Tensor, layout: GatherLayout) -> list[Tensor]:
    """View the destinations of dealt parameters: ``[n, *shard]`` for each run of ``n`` ranks."""
    targets = []
    for index, run, _ in layout.landing.copied:
        item, shard = layout.items[index], layout.items[index].shard
        assert shard.dim is not None
        flat = typed(full, layout.full_offsets[index], shard.numel, item.compute_dtype)
        start, rows = shard.span(run.first)
        part = flat.as_strided(shard.shape, shard.stride).narrow(shard.dim, start, run.ranks * rows)
        targets.append(part.unflatten(shard.dim, (run.ranks, rows)).movedim(shard.dim, 0))
    return targets


def unpack(gathered: Tensor, layout: GatherLayout, targets: list[Tensor]) -> None:
    """Copy the result of one all-gather, ``[W, C]``, into ``targets`` (from ``gather_targets``)."""
    packed = layout.packed
    if packed.is_one_split:
        torch.split_with_sizes_copy(gathered, packed.sizes, dim=1, out=targets)
        return
    coded = Decoding(gathered, layout.coding)
    for target, index in zip(targets, packed.order, strict=True):
        item, start = layout.items[index], layout.send_offsets[index]
        if item.shard.numel == 0:
            continue
        if item.lands_as_it_is:
            begin = start // gathered.dtype.itemsize
            target.copy_(gathered[: len(target), begin : begin + target.shape[1]])
        elif item.coding is not None:
            coded.add_padded(target, start, item.shard)
        else:
            rows = gathered.view(torch.uint8)[:, start : start + layout.padded_nbytes(index)]
            _unpack_strided(target, rows.view(item.compute_dtype), item.shard)
    coded.run()


def unpack_replicated(send: Tensor, layout: GatherLayout, targets: Sequence[Tensor]) -> None:
    for target, index in zip(targets, layout.replicated, strict=True):
        item, start = layout.items[index], layout.send_offsets[index]
        own = typed(send, start, item.shard.numel, item.compute_dtype)
        target.copy_(own.view(item.shard.shape))


def _unpack_strided(target: Tensor, padded: Tensor, shard: ShardLayout) -> None:
    """Copy padded shards ``[W, padded_numel]`` into a tensor with any strides and shard dim."""
    padded = padded.unflatten(1, shard.padded_shape)
    for first, part in _shards_in(target, shard):
        part.copy_(_unpadded(padded, first, part))


class Decoding:
    """Collects encoded shards, to decode all of them together."""

    def __init__(self, gathered: Tensor, how: Coding | None) -> None:
        self._gathered = gathered
        self._views = None if how is None else Views(gathered.view(torch.uint8), how)
        self._targets: list[Tensor] = []
        self._made: list[Codes] = []

    def add(self, target: Tensor, start: int, room: Sequence[int], step: int) -> None:
        """Add shards ``[n, *shape]`` that begin ``step`` bytes apart, the first at ``start``."""
        assert self._views is not None
        self._targets.append(target)
        self._made.append(self._views.at(start, target.shape[1:], room, len(target), step))

    def add_padded(self, target: Tensor, start: int, shard: ShardLayout) -> None:
        """Add all ranks' padded shards, each at byte ``start`` of its row of ``[W, C]``."""
        step = self._gathered.stride(0) * self._gathered.itemsize
        for first, part in _shards_in(target, shard):
            self.add(part, start + first * step, shard.padded_shape, step)

    def run(self) -> None:
        if self._targets:
            decode(self._targets, self._made)


def decode_padded(
    target: Tensor,
    rows: Tensor,
    shard: ShardLayout,
    how: Coding,
) -> None:
    """Decode all ranks' padded shards from bytes ``[W, nbytes]``, as part of a traced graph."""
    room = shard.padded_shape
    start = how.scales_start(room)
    end = start + how.scale_count(room) * SCALE_DTYPE.itemsize
    scales = rows[:, start:end].view(SCALE_DTYPE)
    codes = rows[:, : shard.padded_numel].view(how.dtype).unflatten(1, room)
    for first, part in _shards_in(target, shard):
        count = how.scale_count(part.shape[1:])
        own = scales[first : first + len(part), :count]
        decode([part], [Codes(_unpadded(codes, first, part), own)])


def _shards_in(target: Tensor, shard: ShardLayout) -> Iterator[tuple[int, Tensor]]:
    """Yield the first rank and ``[n, *shard]`` view of each run of ranks with equal row counts."""
    assert shard.dim is not None
    dim, chunk = shard.dim, shard.rows(0)
    whole, rest = divmod(shard.shape[dim], chunk)
    if whole:
        shape, stride = list(target.shape), target.stride()
        shape[dim] = chunk
        size, steps = (whole, *shape), (chunk * stride[dim], *stride)
        yield 0, target.as_strided(size, steps, target.storage_offset())
    if rest:
        yield whole, target.narrow(dim, whole * chunk, rest).unsqueeze(0)


def _unpadded(padded: Tensor, first: int, part: Tensor) -> Tensor:
    """View the shards of ``len(part)`` ranks, without padding, in the shape of ``part``."""
    padded = padded[first : first + len(part)]
    if padded.shape == part.shape:
        return padded
    numel = part[0].numel()  # one rank's rows, at the start of its padded shard
    return padded.reshape(1, -1)[:, :numel].view(part.shape)
