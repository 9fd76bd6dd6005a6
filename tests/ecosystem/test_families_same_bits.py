"""Promise: families of `transformers` train with the same bits on one, two and four ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

import fsdp2
from tests.ecosystem._families import ROWS, Family, batch_of, build, loss_of, units_of
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.parity import bits, names_of, whole
from tests.kit.pool import ranks_that_share

pytestmark = pytest.mark.ecosystem

SLOTS, STEPS = 4, 2
CAUSAL = (
    "llama mistral qwen2 qwen3 gemma2 gpt2 gpt_neox phi3 opt bloom falcon olmo2 mixtral mamba "
    "granite"
)
TRIED = [f"{name}-causal" for name in CAUSAL.split()]
TRIED += ["bert-masked", "roberta-masked", "deberta-v2-masked", "t5-sequence", "bart-sequence"]
TRIED += ["vit-images", "swin-images", "convnext-images"]
REFUSED = "resnet-images"  # it has batch norms


def trained(family: Family, size: int) -> dict[str, torch.Tensor]:
    """Return losses, norms and parameters of a job of so many ranks; jobs run side by side."""
    mesh = shared_mesh((dist.get_world_size() // size, size), ("job", "shard"))["shard"]
    model = seeded(partial(build, family))
    for unit in (*units_of(model), model):
        fsdp2.fully_shard(unit, mesh=mesh)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        batches = [batch_of(model, family, ROWS) for _ in range(SLOTS)]
        losses = []
        for slot in mine:
            loss = loss_of(model, batches[slot], SLOTS * step + slot)
            loss.backward()
            losses.append(loss.detach())
        found[f"loss {step}"] = fsdp2.mean_over_slots(model, losses)
        found[f"norm {step}"] = fsdp2.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: whole(param).detach() for name, param in names_of(model).items()}


@pytest.mark.parametrize("family", TRIED)
@ranks_that_share(4, limit_s=240)
def test_a_family_has_the_same_bits_on_one_two_and_four_ranks(family: str) -> None:
    expected = trained(Family.parse(family), 1)
    assert expected["norm 1"] > 0
    for size in (2, 4):
        found = trained(Family.parse(family), size)
        for name, value in found.items():
            assert torch.equal(bits(value), bits(expected[name])), f"{name} on {size} ranks"


@ranks_that_share(2, limit_s=120)
def test_a_family_with_batch_norms_is_refused_by_name() -> None:
    with pytest.raises(fsdp2.ConfigError, match="normalization is a BatchNorm2d") as error:
        trained(Family.parse(REFUSED), 2)
    assert error.value.code == "FS516"
