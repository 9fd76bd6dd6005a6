"""Which rows of a dim each rank of an axis has: ints only.

Two rules: *chunks*, which is what DTensor's ``Shard`` means, and a *deal* of whole blocks, which is
what ``fsdp2.Whole`` and ``fsdp2.Aligned`` ask for. It must not know tensors or meshes.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERYTHING = 2**62
"""Rows of a block that has all there are, of a dim of any length."""


@dataclass(frozen=True)
class Deal:
    """Rows in whole blocks, dealt to the places of an axis.

    Each place has the same number of blocks, of ``block`` rows; those that are left over go one by
    one to the place ``first`` and the places after it, after the last one to the first again. Every
    place's blocks lie side by side, and places in their order. The last block may be shorter. With
    ``ends`` the row behind the last one of each place is written out, and no rule.
    """

    block: int
    first: int = 0
    ends: tuple[int, ...] = ()

    @property
    def owner(self) -> int | None:
        """The place that has all rows; None: they are divided."""
        return self.first if self.block == EVERYTHING else None

    @property
    def asked_by(self) -> str:
        """Say, for a message, how rows lie, and who asked for that."""
        if self.owner is not None:
            return "lies whole on one rank (fsdp2.Whole)"
        return f"lies in blocks of {self.block} rows (fsdp2.Aligned)"


def deal_of_long_blocks(length: int, count: int, block: int, first: int) -> Deal:
    """Deal blocks of which none is shorter: the last one has the rows behind it, too."""
    blocks = max(length // block, 1)
    rule, ends = Deal(1, first), []
    for place in range(count):
        start, has = rows_of(blocks, count, place, rule)
        ends.append(length if start + has == blocks else (start + has) * block)
    return Deal(block, first, tuple(ends))


def chunk_of(length: int, count: int, place: int) -> tuple[int, int]:
    """Return the first row of a chunk, and how many it has.

    Chunks are those of ``torch.chunk``, which is what DTensor's ``Shard(dim)`` means: the first is
    the largest, and the last ones may have fewer rows, or none.
    """
    chunk = -(-length // count)
    start = min(place * chunk, length)
    return start, min(chunk, length - start)


def rows_of(length: int, count: int, place: int, deal: Deal | None = None) -> tuple[int, int]:
    """Return the first row that a place has, and how many: a chunk, or what it is dealt."""
    if deal is None:
        return chunk_of(length, count, place)
    if deal.ends:
        start = deal.ends[place - 1] if place else 0
        return start, deal.ends[place] - start
    each, over = divmod(-(-length // deal.block), count)
    # places that got one more block: `over` of them from `first` on, around the end
    behind = deal.first + over - count
    before = min(max(place - deal.first, 0), over) + min(place, max(behind, 0))
    gets_more = (place - deal.first) % count < over
    start = min((each * place + before) * deal.block, length)
    return start, min((each + gets_more) * deal.block, length - start)


def most_rows(length: int, count: int, deal: Deal | None = None) -> int:
    """Return the rows of the place that has the most."""
    if deal is None:
        return chunk_of(length, count, 0)[1]
    return max(rows_of(length, count, place, deal)[1] for place in range(count))


def cuts_a_block(length: int, count: int, block: int, least: int = 1) -> bool:
    """True if some chunk ends inside a block, or has rows, and fewer than ``least``."""
    chunk = chunk_of(length, count, 0)[1]
    rest = length % chunk or chunk
    return chunk < length and (chunk % block != 0 or rest < least)
