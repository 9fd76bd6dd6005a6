"""Promise: what the paragraph of an error says leads to that error, and its remedy mends it.

The programs are in `tests/_error_ways`, a file for each of `fsdp2/_errors`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from tests._error_ways import WAYS
from tests._error_ways._programs import MADE, Net
from tests._meshes import DEVICE
from tests._pool import ranks


@pytest.mark.parametrize("key", WAYS)
@ranks(2)
def test_a_way_leads_there_and_its_remedy_elsewhere(key: str) -> None:
    chosen = WAYS[key]
    if DEVICE != "cpu" and (chosen.code.startswith("FS8") or "compiled" in key):
        pytest.skip("gloo has no functional collectives for memory of a device")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        text, code = "", ""
        try:
            chosen.program(False)
        except fsdp2.FSDPError as error:
            text, code = str(error), error.code
        else:
            ours = [str(w.message) for w in warned if f"[{chosen.code}]" in str(w.message)]
            assert ours, f"no error, and no warning with {chosen.code}"
            text, code = ours[0], chosen.code
    assert f"[{chosen.code}]" in text, text  # or inside of another: which ranks failed, and why
    assert text.endswith(f"[{code}]")
    for word in chosen.words:
        assert word in text, f"{word!r} is not in {text!r}"
    chosen.program(True)
    dist.barrier()
    while MADE:
        shutil.rmtree(MADE.pop(), ignore_errors=True)


@pytest.mark.parametrize("mended", [False, True])
@ranks(1, with_process_group=False)
def test_no_process_group(mended: bool) -> None:
    """FS218: a launcher tells the processes of each other. A mesh needs a process group too."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if mended or name not in names}
    with mock.patch.dict(os.environ, kept, clear=True):
        if mended:
            fsdp2.fully_shard(Net())
            dist.destroy_process_group()
            return
        with pytest.raises(fsdp2.ConfigError, match="torchrun") as caught:
            fsdp2.fully_shard(Net())
        assert caught.value.code == "FS218"
        with pytest.raises(ValueError, match="environment variable"):
            init_device_mesh(DEVICE, (1,))
