"""The table of what kinds of devices can do is all that a new kind needs."""

from __future__ import annotations

import pytest
import torch

from fsdp2._core.base import capabilities
from fsdp2._core.base.capabilities import Capabilities, ZeroCopy
from fsdp2._core.base.policy import CPUOffloadPolicy, Residence
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.wire import Streams

KIND = "xpu"


def residence() -> Residence:
    return Residence(torch.device(KIND), CPUOffloadPolicy())


def test_a_kind_that_is_not_listed_is_like_cuda() -> None:
    found = capabilities.capabilities(torch.device(KIND))
    assert found == capabilities.capabilities(torch.device("cuda"))
    assert found.has_lanes
    assert found.coalesces
    assert residence().is_away
    assert residence().is_pinned
    assert residence().storage == torch.device("cpu")


def test_a_row_changes_what_is_done_on_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Capabilities(is_host=True, has_lanes=False, pins=False)
    monkeypatch.setitem(capabilities._KINDS, KIND, row)
    assert type(streams_for(torch.device(KIND))) is Streams
    assert not residence().is_away
    assert not residence().is_pinned
    monkeypatch.setitem(capabilities._KINDS, KIND, Capabilities(pins=False))
    assert residence().is_away
    assert not residence().is_pinned


def test_a_parameter_travels_alone_by_what_each_rank_has_of_it() -> None:
    """On a device the bound grows with the ranks up to 64, and again from 512 on."""
    device, host = (capabilities.capabilities(torch.device(kind)) for kind in (KIND, "cpu"))
    for ranks, kib in ((1, 512), (3, 1536), (64, 32768), (512, 32768), (520, 33280)):
        assert device.zero_copy(ranks) == ZeroCopy(kib * 1024, capabilities.ROW_NBYTES)
        assert host.zero_copy(ranks) == ZeroCopy(capabilities.ZERO_COPY_NBYTES)
    # a backend that takes one collective at a time, or none
    for kind in ("mps", "meta"):
        assert capabilities.capabilities(torch.device(kind)).zero_copy(8) is None


def test_a_kind_with_one_stream_has_no_priorities() -> None:
    assert capabilities.capabilities(torch.device("mps")).lane_priority == 0


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_without_a_device_there_are_no_lanes(kind: str) -> None:
    assert type(streams_for(torch.device(kind))) is Streams
