"""Checksums of tensors and of parts of files, and the tail of a file."""

from __future__ import annotations

import io
import zlib

import pytest
import torch

from fsdp2.checkpoint._checksums import (
    BLOCK_NBYTES,
    DamagedError,
    split,
    sum_of_part,
    sum_of_tensor,
    tail_of,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (13, 29)])
def test_the_sum_of_a_tensor_is_that_of_its_bytes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape).to(dtype)
    content = b"" if not tensor.numel() else bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert sum_of_tensor(tensor) == zlib.crc32(content)
    assert sum_of_tensor(tensor, 5) == zlib.crc32(content, 5)


@pytest.mark.parametrize("length", [0, 1, BLOCK_NBYTES - 1, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 1])
def test_the_sum_of_a_part_of_a_file(length: int) -> None:
    content = bytes(range(256)) * (length // 256 + 2)
    file = io.BytesIO(content)
    assert sum_of_part(file, 7, length) == zlib.crc32(content[7 : 7 + length])


def test_a_part_behind_the_end_of_a_file() -> None:
    with pytest.raises(DamagedError, match="3 bytes too short"):
        sum_of_part(io.BytesIO(b"12345"), 2, 6)


def test_a_tail_is_found_and_every_bit_of_its_file_counts() -> None:
    content, told = b"pickled", {"file": [1, 2]}
    data = content + tail_of(content, told)
    assert split(data) == (content, told)
    for place in range(8 * (len(data) - 8)):  # the last eight bytes say that there is a tail
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(DamagedError):
            split(bytes(damaged))
    for place in range(8 * (len(data) - 8), 8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        assert split(bytes(damaged))[1] is None


def test_without_a_tail_all_is_content() -> None:
    for content in (b"", b"short", b"something that is longer than a footer"):
        assert split(content) == (content, None)
