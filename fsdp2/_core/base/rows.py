"""Compute the rows of a dim that each rank of an axis stores, with integer arithmetic only.

There are two rules: *chunks*, as in DTensor's ``Shard``, and a *deal* of whole blocks, for
``fsdp2.Whole`` and ``fsdp2.Aligned``. Contains no tensor or mesh code.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERYTHING = 2**62  # a block size that covers a dim of any length


@dataclass(frozen=True)
class Deal:
    """A distribution of whole blocks of rows over the places (ranks) of an axis. Each place gets
    the same number of blocks of ``block`` rows; any remaining blocks go one by one to place
    ``first`` and the places after it, cyclically. Each place's rows are contiguous, and follow
    those of the previous place. The last block may be shorter. If ``ends`` is not empty, it lists
    the end row of each place, and overrides these rules."""

    block: int
    first: int = 0
    ends: tuple[int, ...] = ()

    @property
    def owner(self) -> int | None:
        """The place that has all rows; None if rows are divided."""
        return self.first if self.block == EVERYTHING else None

    @property
    def asked_by(self) -> str:
        """Describe the layout, and the API that requested it, for a message."""
        if self.owner is not None:
            return "is stored on one rank (fsdp2.Whole)"
        return f"is dealt in blocks of {self.block} rows (fsdp2.Aligned)"


def deal_of_long_blocks(length: int, count: int, block: int, first: int) -> Deal:
    """Deal blocks of ``block`` rows. The last block also contains the remaining rows."""
    blocks = max(length // block, 1)
    rule, ends = Deal(1, first), []
    for place in range(count):
        start, has = rows_of(blocks, count, place, rule)
        ends.append(length if start + has == blocks else (start + has) * block)
    return Deal(block, first, tuple(ends))


def chunk_of(length: int, count: int, place: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a chunk. Rows are split as by ``torch.chunk``
    and DTensor's ``Shard(dim)``: the last chunks may have fewer rows than the first, or none."""
    chunk = -(-length // count)
    start = min(place * chunk, length)
    return start, min(chunk, length - start)


def rows_of(
    length: int,
    count: int,
    place: int,
    deal: Deal | None = None,
) -> tuple[int, int]:
    """Return the first row and the number of rows of a place, in chunks if ``deal`` is None."""
    if deal is None:
        return chunk_of(length, count, place)
    if deal.ends:
        start = deal.ends[place - 1] if place else 0
        return start, deal.ends[place] - start
    each, over = divmod(-(-length // deal.block), count)
    # `over` places get an additional block: `first` and the places after it, with wraparound
    behind = deal.first + over - count
    before = min(max(place - deal.first, 0), over) + min(place, max(behind, 0))
    gets_more = (place - deal.first) % count < over
    start = min((each * place + before) * deal.block, length)
    return start, min((each + gets_more) * deal.block, length - start)


def most_rows(length: int, count: int, deal: Deal | None = None) -> int:
    if deal is None:
        return chunk_of(length, count, 0)[1]
    return max(rows_of(length, count, place, deal)[1] for place in range(count))


def cuts_a_block(length: int, count: int, block: int, least: int = 1) -> bool:
    """Return True if a chunk ends inside a block, or has between 1 and ``least - 1`` rows."""
    chunk = chunk_of(length, count, 0)[1]
    rest = length % chunk or chunk
    return chunk < length and (chunk % block != 0 or rest < least)
