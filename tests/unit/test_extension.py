"""Gathered inputs become outputs: the true rows of every rank, on storages that come back."""

from __future__ import annotations

import pytest
import torch

from fsdp2._core.params.extension import InputLayout, Output
from fsdp2._core.params.layout import align

DTYPES = [torch.int8, torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(3, 3), (2, 2, 1), (2, 2, 0), (1, 0, 0, 0), (2, 0, 1), (0, 0)])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_outputs_are_the_true_rows(
    rows: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Padding is dropped for any split of rows, any row and any dtype, again after a free."""
    layout = InputLayout(rows, shape, dtype, start=16)
    width = 16 + align(layout.most_nbytes)
    output = Output(layout, torch.device("cpu"))
    version = output.tensor._version
    for _ in range(2):
        parts = [(torch.randn(n, *shape) * 4).to(dtype) for n in rows]
        gathered = torch.full((len(rows), width), 0xA5, dtype=torch.uint8)
        for rank, part in enumerate(parts):
            own = part.reshape(-1).view(torch.uint8)
            gathered[rank, 16 : 16 + own.numel()] = own
        output.fill(gathered)
        expected = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        assert torch.equal(output.tensor.reshape(-1).view(torch.uint8), expected)
        assert output.tensor.shape == (sum(rows), *shape)
        assert output.tensor._version == version
        output.storage.resize_(0)
