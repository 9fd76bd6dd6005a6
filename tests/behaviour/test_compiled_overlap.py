"""Promise: in the code that inductor emits, collectives run beside the compute, without copies.

What a pass returned counts for nothing here: the tests read the emitted forward and backward.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from benchmarks.kit.models import Size
from tests.kit.emitted import BACKWARD, FORWARD, Step, emitted_step
from tests.kit.models import TORCH_2_14

TWO_BLOCKS = Size(depth=2, width=64, hidden=128, vocabulary=256, tokens=8)


def order_of(step: Step, graph: str) -> str:
    """Write collectives with their numbers, their first waits, and products between them."""
    words: list[str] = []
    waited: set[int] = set()
    for event in step.graphs[graph]:
        if event.kind == "issue":
            name = "gather" if "gather" in event.name else "reduce"
            words.append(f"{name}{event.ids[0]}")
        elif event.kind == "wait" and not waited.issuperset(event.ids):
            words += [f"wait{number}" for number in event.ids if number not in waited]
            waited.update(event.ids)
        elif event.is_product and words[-1:] != ["mm"]:
            words.append("mm")
    return " ".join(words)


def test_each_setting_in_what_is_emitted() -> None:
    """A gather is issued before the unit before it computes; a reduction waits as the setting says.

    Two blocks, an embedding and a head. With the default nothing runs beside the first gather, nor
    beside the first block's (an embedding is no product), nor the last two reductions.
    """
    balanced = emitted_step(4, size=TWO_BLOCKS)
    low = emitted_step(4, size=TWO_BLOCKS, memory="low")
    assert len(balanced.exceptions) == 4
    for step in (balanced, low):
        assert step.passes("copy") < 0.05
        assert not step.unknown
    assert low.peak_nbytes < balanced.peak_nbytes
    if TORCH_2_14:  # inductor moves some on, behind our pass
        return
    assert_expected_inline(
        "\n".join(order_of(step, graph) for step in (balanced, low) for graph in step.graphs),
        """\
gather0 gather1 wait0 wait1 gather2 mm wait2 gather3 mm wait3 mm
gather4 mm reduce5 mm gather6 wait4 mm reduce7 mm wait6 mm wait5 reduce8 wait7 reduce9 wait9 wait8
gather0 wait0 gather1 wait1 mm gather2 wait2 mm gather3 wait3 mm
mm reduce4 wait4 mm gather5 wait5 mm reduce6 wait6 mm gather7 wait7 mm reduce8 wait8 reduce9 wait9""",  # noqa: E501  # one graph a line
    )


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("memory", [None, "fast"])
def test_more_blocks(memory: str | None, bf16: bool) -> None:
    step = emitted_step(4, bf16=bf16, memory=memory)
    assert len(step.exceptions) == 4
    assert not step.unknown
    if not bf16:  # else rounding of an embedding's gradient looks like one
        assert step.passes("copy") < 0.05


@pytest.mark.slow
def test_regions_in_what_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal blocks are one piece of code, and backward gathers their parameters again."""
    from benchmarks.kit.models import Block

    monkeypatch.setattr(Block, "forward", torch.compiler.nested_compile_region(Block.forward))
    step = emitted_step(4, size=TWO_BLOCKS)
    assert order_of(step, FORWARD).startswith("gather0 gather1")
    assert order_of(step, BACKWARD).count("gather") == 2
    assert len(step.exceptions) == 4
    assert step.passes("copy") < 0.05


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
import fsdp2

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head, self.unused = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x):
        return self.head(torch.relu(self.block(x)))


model = Model()
fsdp2.fully_shard(model.block)
fsdp2.fully_shard(model)
compiled = fsdp2.compile(model, fullgraph=True)
compiled(torch.randn(2, 16)).sum().backward()
missing = [name for name, p in model.named_parameters() if p.grad is None]
found = {name: count for part in ("aot_autograd", "inductor") for name, count in
         counters[part].items() if "cache" in name}
print("FOUND", missing, found)
"""


@pytest.mark.slow
def test_a_second_process_starts_warm(tmp_path: Path) -> None:
    """No cache is passed by; and what has no gradient is known without a trace."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    lines = []
    for _ in range(2):
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        lines.append(next(line for line in ran.stdout.splitlines() if line.startswith("FOUND")))
    missing = "['unused.weight', 'unused.bias']"
    assert lines[0].startswith(f"FOUND {missing}")
    assert "autograd_cache_saved" in lines[0]
    assert lines[1] == f"FOUND {missing} {{'autograd_cache_hit': 1, 'fxgraph_cache_hit': 2}}"
