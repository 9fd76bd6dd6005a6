"""Promise: what attention costs is counted with few heads of keys, too, on every torch."""

from __future__ import annotations

import pytest
import torch

from fsdp2._core.base.torch_flops import FLOPS

CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_attention_is_counted_by_the_heads_of_the_query(heads: int) -> None:
    batch, rows, columns, width = 3, 13, 29, 8
    query = torch.empty(batch, 6, rows, width)
    key, value = (torch.empty(batch, heads, columns, width) for _ in range(2))
    products = 2 * batch * 6 * rows * columns * width  # of queries and keys; as many with values
    out = torch.empty(batch, 6, rows, width)
    assert FLOPS[CPU](query, key, value, out_val=out) == 2 * products
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    more = (out, torch.empty(batch, 6, rows), 0.0, False)
    found = FLOPS[backward](out, query, key, value, *more, out_val=(query, key, value))
    assert found == 5 * products
