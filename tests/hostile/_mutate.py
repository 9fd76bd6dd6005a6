"""Changes of a file's bytes, drawn from a seed: of any bytes, of pickles, of JSON, of archives."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

Draw = random.Random
Change = Callable[[bytes, Draw], bytes]


def flip(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 8))):
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: Draw) -> bytes:
    return content[: draw.randrange(len(content))]


def insert(content: bytes, draw: Draw) -> bytes:
    place, count = draw.randrange(len(content) + 1), draw.choice((1, 2, 8, 64, 4096))
    return content[:place] + draw.randbytes(count) + content[place:]


def repeat(content: bytes, draw: Draw) -> bytes:
    """Put a part of the content elsewhere in it, or leave one out."""
    start, place = draw.randrange(len(content)), draw.randrange(len(content))
    end = min(len(content), start + draw.choice((1, 4, 32, 512)))
    if draw.random() < 0.5:
        return content[:start] + content[end:]
    return content[:place] + content[start:end] + content[place:]


def number(content: bytes, draw: Draw) -> bytes:
    """Write a number that sizes and lengths do not have."""
    form, value = draw.choice(
        (
            *(("<I", value) for value in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFF)),
            *(("<Q", value) for value in (0, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)),
            *(("<H", value) for value in (0, 8, 0xFFFF)),
        )
    )
    data = struct.pack(form, value)
    place = draw.randrange(max(1, len(content) - len(data)))
    return content[:place] + data + content[place + len(data) :]


BYTES: tuple[Change, ...] = (flip, cut, insert, repeat, number)

CODES = [code[0] for name, code in vars(pickle).items() if name.isupper() and type(code) is bytes]
PIECES = (
    b"\x8d" + struct.pack("<Q", 1 << 36),
    b"\x96" + struct.pack("<Q", 1 << 36),
    b"\x8b\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x0f",
    b"j\xff\xff\xff\x0f",
    b"cos\nsystem\n",
    b"cbuiltins\nrange\nJ\xff\xff\xff\x7f\x85R",
    b"cbuiltins\nlist\n",
    b"ccollections\nOrderedDict\n",
    b"}X\x05\x00\x00\x00limitK\x07sb",
    *(
        b"N.",
        b"N",
        b"K\x00",
        b"(",
        b"t",
        b"0",
        b"2",
        b")R",
        b")\x81",
        b"}b",
        b"Na",
        b"NNs",
        b"\x85",
    ),
)


def instruction(content: bytes, draw: Draw) -> bytes:
    """Exchange, or add, an instruction of a pickle."""
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        return content[:place] + bytes([draw.choice(CODES)]) + content[place + 1 :]
    return content[:place] + draw.choice(PIECES) + content[place:]


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1 << 31, -(1 << 63), 1 << 64, 10**400, 0.5, 1e308),
    *(float("nan"), float("inf"), "", "a", "\x1b[2J", "\ud800", "../x", "/etc/passwd", "9" * 50),
    *([], {}, [[]], {"a": {}}, [0, 1], "header", "wait", "step"),
)


def value(content: bytes, draw: Draw) -> bytes:
    """Exchange a value of a JSON text, leave one out, or add one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # by a change before
        return content
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        for key, one in inside.items() if isinstance(inside, dict) else enumerate(inside):
            places.append((inside, key))
            if isinstance(one, dict | list):
                walk(one)

    if not isinstance(found, dict | list) or draw.random() < 0.05:
        return json.dumps(draw.choice(VALUES)).encode()
    walk(found)
    inside, key = draw.choice(places) if places else (found, None)
    how = draw.randrange(4)
    if how == 0 and places:
        del inside[key]
    elif how == 1 and isinstance(inside, dict):
        inside[draw.choice(("more", "", "kind", "n", "a.b"))] = draw.choice(VALUES)
    elif how == 2 and places:
        other, place = draw.choice(places)
        inside[key] = json.loads(json.dumps(other[place]))
    elif places:
        inside[key] = draw.choice(VALUES)
    return json.dumps(found).encode()
