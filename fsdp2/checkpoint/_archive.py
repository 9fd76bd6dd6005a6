"""The list of entries of a zip archive whose entries are stored as they are, as torch writes it.

Owns that form. It must not know what is in the entries.

[Note: archives]
``torch.save`` never compresses. So an entry has as many bytes as it says, lies in the file and
shares none of its bytes with another one, or the archive is refused before anything of it is read:
no few bytes become many.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from fsdp2.checkpoint._checksums import DamagedError

END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
LARGE_END = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
HEADER = struct.Struct("<4s5H3I2H")
FIELD = struct.Struct("<2H")
LARGE = 0xFFFFFFFF
"""Stands for a number that does not fit, and is in a field of its own."""
LARGE_FIELD = 1


@dataclass(frozen=True)
class Stored:
    """An entry: where its bytes lie in the file, and their checksum."""

    offset: int
    length: int
    sum: int


@dataclass(frozen=True)
class _List:
    """Where the list of entries lies, and how many it has."""

    begin: int
    end: int
    count: int


class Archive:
    """An archive that is a part of a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length

    def entries(self) -> dict[str, Stored]:
        """Return all entries by name.

        Raises:
            DamagedError: see [Note: archives].
        """
        where = self._list()
        data, place = self._read(where.begin, where.end - where.begin), 0
        found: dict[str, Stored] = {}
        for _ in range(where.count):
            if place + ENTRY.size > len(data):
                raise DamagedError("the list of its archive ends too early")
            magic, _, _, flags, method, _, _, crc, packed, nbytes, *rest = ENTRY.unpack_from(
                data, place
            )
            in_name, in_extra, in_comment, _, _, _, header = rest
            if magic != b"PK\x01\x02" or flags & 1:
                raise DamagedError("the list of its archive has something else in it")
            name_at = place + ENTRY.size
            place = name_at + in_name + in_extra + in_comment
            name = data[name_at : name_at + in_name].decode()
            extra = data[name_at + in_name : name_at + in_name + in_extra]
            nbytes, packed, header = _in_full([nbytes, packed, header], extra)
            if method != 0 or packed != nbytes:
                raise DamagedError(
                    "an entry of its archive is compressed, and torch compresses none"
                )
            if name in found:
                raise DamagedError("two entries of its archive have one name")
            begin = self._behind_header(header)
            if begin + nbytes > where.begin:
                raise DamagedError("an entry of its archive lies outside of it")
            found[name] = Stored(self._offset + begin, nbytes, crc)
        if [*shared(("", entry.offset, entry.length) for entry in found.values())]:
            raise DamagedError("two entries of its archive lie at one place")
        return found

    def _read(self, place: int, count: int) -> bytes:
        if not 0 <= place <= place + count <= self._length:
            raise DamagedError("its archive points outside of it")
        self._file.seek(self._offset + place)
        data = self._file.read(count)
        if len(data) != count:
            raise DamagedError("it ends too early")
        return data

    def _list(self) -> _List:
        """Read the end, which says where the list is: right before the end."""
        place = self._length - END.size
        magic, disk, first, here, count, nbytes, begin, comment = END.unpack(
            self._read(place, END.size)
        )
        if magic != b"PK\x05\x06" or disk or first or comment:
            raise DamagedError("it is no archive of torch.save, or ends too early")
        at = place - LOCATOR.size
        if at >= 0 and (locator := self._read(at, LOCATOR.size)).startswith(b"PK\x06\x07"):
            place = LOCATOR.unpack(locator)[2]
            fields = LARGE_END.unpack(self._read(place, LARGE_END.size))
            if not fields[0] == b"PK\x06\x06" or place + LARGE_END.size != at:
                raise DamagedError("the end of its archive is damaged")
            here, count, nbytes, begin = fields[6:]
        if here != count or begin + nbytes != place:
            raise DamagedError("the end of its archive is damaged")
        return _List(begin, place, count)

    def _behind_header(self, place: int) -> int:
        """Return where the bytes of an entry begin: behind a header of their own."""
        magic, *_, in_name, in_extra = HEADER.unpack(self._read(place, HEADER.size))
        if magic != b"PK\x03\x04":
            raise DamagedError("an entry of its archive has no header")
        return place + HEADER.size + int(in_name) + int(in_extra)


def _in_full(numbers: list[int], extra: bytes) -> list[int]:
    """Return numbers, those that are too large for their place from the field for these."""
    fields, place = b"", 0
    while place + FIELD.size <= len(extra):
        kind, length = FIELD.unpack_from(extra, place)
        place += FIELD.size
        if kind == LARGE_FIELD:
            fields = extra[place : place + length]
        place += length
    found = []
    for number in numbers:
        if number == LARGE:
            if len(fields) < 8:
                raise DamagedError("the list of its archive lacks a size")
            number, fields = int.from_bytes(fields[:8], "little"), fields[8:]
        found.append(number)
    return found


def shared(places: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield places, each a file, an offset and a length, that begin inside the place before."""
    for (file, offset, length), place in itertools.pairwise(sorted(places)):
        if file == place[0] and offset + length > place[1]:
            yield place
