"""Promise: `transformers` shards models at load time and by its `Trainer` with
`fsdp2.replace_torch()` as with torch's own FSDP2, or as the plain model where torch's own cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import fsdp2
from tests.ecosystem._clients import LIBRARIES, run_program
from tests.ecosystem._programs import adamw, tokens, transformers
from tests.kit.in_turn import advance
from tests.kit.models import seeded
from tests.kit.parity import assert_same, names_of, whole
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

pytestmark = pytest.mark.ecosystem

if not hasattr(transformers, "DistributedConfig"):
    pytest.skip("this transformers has no DistributedConfig", allow_module_level=True)

DistributedConfig = transformers.DistributedConfig
PLAN = {"model.embed_tokens": "free_full_weight", "model.layers.*": "free_full_weight"}
PLAN |= {"model.norm": "keep_full_weight"}  # `lm_head` is in the plan of the class


def llama(tied: bool) -> nn.Module:
    """Build a Llama that tensor-parallel plans can cut in two."""
    config = transformers.LlamaConfig(
        vocab_size=84,
        hidden_size=32,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    """Build a Mixtral of four experts, which two and four ranks divide."""
    config = transformers.MixtralConfig(
        vocab_size=84,
        hidden_size=32,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
    )
    return transformers.MixtralForCausalLM(config)


@dataclass
class Run:
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def check(self, expected: Run, rtol: float = 1e-5) -> None:
        assert list(self.weights) == list(expected.weights)
        for name in ("losses", "norms"):
            pairs = zip(getattr(self, name), getattr(expected, name), strict=True)
            for step, (one, other) in enumerate(pairs):
                assert_same(one, other, f"{name}[{step}]", rtol)
        for name, value in expected.weights.items():
            assert_same(self.weights[name], value, name, rtol)


def train(model: nn.Module, numbers: range = range(3)) -> Run:
    run = Run()
    copies = getattr(model, "_tp_size", 1)  # ranks of one tensor-parallel group share a batch
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for number in numbers:
        torch.manual_seed(100 * number + dist.get_rank() // copies)
        loss = model(**tokens(2).kwargs).loss
        loss.backward()
        advance(optimizer)
        run.losses.append(loss.detach())
    run.weights = {name: whole(p).clone() for name, p in names_of(model).items()}
    return run


def written(tied: bool, folder: Path, build: Callable[[], nn.Module] | None = None) -> Path:
    """Return where rank 0 has saved the plain model: a Llama, or what `build` makes."""
    if dist.get_rank() == 0:
        seeded(build or (lambda: llama(tied))).save_pretrained(folder / "source")
    dist.barrier()
    return folder / "source"


def load(library: str, source: str | Path, **settings: Any) -> nn.Module:
    """Load a model that is sharded as it is loaded; `library` is replaced or is not."""
    config = DistributedConfig(fsdp_plan=PLAN, **settings)
    kind = transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_pretrained(source, distributed_config=config)
    assert isinstance(model, fsdp2.FSDPModule) == (library == "fsdp2")
    assert isinstance(model, torch_fsdp.FSDPModule)
    return model


def load_and_train(library: str, source: str | Path, **settings: Any) -> Run:
    with LIBRARIES[library]():
        return train(load(library, source, **settings))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"fsdp_size": 2},
    "bf16": {"fsdp_size": 2, "fsdp_mixed_precision": True},
}
SETTINGS_OF_FOUR: dict[str, dict[str, Any]] = {
    "replicated": {"fsdp_size": 2, "dp_replicate_size": 2},
    "tensor parallel": {"fsdp_size": 2, "tp_size": 2},
}
EXPERTS_OF_FOUR: dict[str, dict[str, Any]] = {
    "sharded": {"fsdp_size": 4, "ep_size": 2},  # an expert on two ranks: the axis `efsdp`
    "replicated": {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    "owned": {"fsdp_size": 4, "ep_size": 4},
    "sharded, tensor parallel": {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    "owned, tensor parallel": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}


def test_the_program_trains_saves_and_loads_as_with_torchs_own(tmp_path: Path) -> None:
    """`with_transformers.py` gives the losses of torch's own, in both orders of imports."""
    torchs = run_program("with_transformers", "torch", str(tmp_path / "torch"))
    assert torchs.implementation == "torch"
    for way in ("-m fsdp2", "imported before"):
        client = "transformers.distributed.fsdp"
        ours = run_program("with_transformers", way, str(tmp_path / way), client=client)
        assert ours.implementation == "fsdp2"
        assert ours.losses == pytest.approx(torchs.losses, rel=1e-5)
        assert (tmp_path / way / "whole" / "model.safetensors").exists()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_a_model_sharded_at_load_trains_as_with_torchs_own(
    setting: str, tied: bool, tmp_path: Path
) -> None:
    """`from_pretrained(distributed_config=...)` loads and trains to the values of torch's own."""
    source = written(tied, tmp_path)
    ours, theirs = (load_and_train(library, source, **SETTINGS[setting]) for library in LIBRARIES)
    ours.check(theirs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("setting", SETTINGS_OF_FOUR)
@ranks(4)
def test_a_model_sharded_on_two_axes_trains_as_with_torchs_own(
    setting: str, tied: bool, tmp_path: Path
) -> None:
    """So too with two replicas of two shards, and with tensor parallelism on two ranks."""
    source = written(tied, tmp_path)
    settings = SETTINGS_OF_FOUR[setting]
    ours, theirs = (load_and_train(library, source, **settings) for library in LIBRARIES)
    ours.check(theirs)


@ranks(2)
def test_experts_on_two_ranks_train_like_the_plain_model(tmp_path: Path) -> None:
    """With `ep_size` each rank owns some experts; weights are torch's own and the plain model's."""
    check_experts({"fsdp_size": 2, "ep_size": 2}, tmp_path)


@pytest.mark.parametrize("setting", with_slow(EXPERTS_OF_FOUR, default=("sharded", "replicated")))
@ranks(4)
def test_experts_on_four_ranks_train_like_the_plain_model(setting: str, tmp_path: Path) -> None:
    """So too where experts are sharded or replicated, and with tensor parallelism beside them."""
    check_experts(EXPERTS_OF_FOUR[setting], tmp_path)


def check_experts(settings: dict[str, Any], folder: Path) -> None:
    """Compare losses and weights with torch's own, and what is saved with the plain model."""
    source = written(False, folder, mixtral)
    runs = {}
    for library in LIBRARIES:
        with LIBRARIES[library]():
            model = load(library, source, **settings)
            runs[library] = train(model)
            if library == "fsdp2":
                model.save_pretrained(folder / "saved")
            del model
    runs["fsdp2"].check(runs["torch"])
    saved, expected = plain_values(folder / "saved"), plain_training(source, settings)
    assert list(saved) == list(expected)
    for name, value in expected.items():
        assert_same(saved[name], value, name, 1e-4)


def plain_training(source: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of the plain model after training on the batches of all ranks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    optimizer = adamw(list(model.parameters()))
    count = dist.get_world_size() // settings.get("tp_size", 1)
    for number in range(3):
        for index in range(count):
            torch.manual_seed(100 * number + index)
            (model(**tokens(2).kwargs).loss / count).backward()
        advance(optimizer)
    return names_of(model)


@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_a_trained_shard_holds_no_more_than_itself(library: str, tmp_path: Path) -> None:
    """transformers loads parts of whole tensors; torch's own keeps the whole ones in memory."""
    source = written(False, tmp_path)
    with LIBRARIES[library]():
        model = load(library, source, fsdp_size=2)
        train(model, range(1))
        shards = [p.to_local() for p in model.parameters()]
        held = sum(
            {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in shards}.values()
        )
        assert held / sum(shard.nbytes for shard in shards) == (1 if library == "fsdp2" else 2)


@ranks(2)
def test_offload_trains_as_without(tmp_path: Path) -> None:
    """`fsdp_cpu_offload` gives the values of torch's own without it: it cannot on a CPU."""
    source = written(False, tmp_path)
    offloaded = load_and_train("fsdp2", source, fsdp_size=2, fsdp_cpu_offload=True)
    offloaded.check(load_and_train("torch", source, fsdp_size=2))
    with pytest.raises(RuntimeError, match="accelerator"):
        load_and_train("torch", source, fsdp_size=2, fsdp_cpu_offload=True)


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_generation_gives_the_plain_models_tokens(tied: bool, tmp_path: Path) -> None:
    """`generate` of a model that was sharded at load time and trained gives each rank's tokens."""
    source = written(tied, tmp_path)
    with fsdp2.replace_torch():
        model = load("fsdp2", source, fsdp_size=2)
        run = train(model)
        plain = llama(tied)
        plain.load_state_dict(run.weights)
        prompt = {"input_ids": torch.randint(3, 84, (2, 4 + dist.get_rank()))}
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
        texts = [
            one.eval().generate(**prompt, do_sample=False, max_new_tokens=5, eos_token_id=None)
            for one in (model, plain)
        ]
        assert torch.equal(*texts)


def plain_values(folder: Path) -> dict[str, Tensor]:
    """Return what transformers loads from a folder into one plain model."""
    return names_of(transformers.AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("setting", [*SETTINGS, *SETTINGS_OF_FOUR])
@ranks(4)
def test_what_is_saved_whole_loads_into_a_plain_model(
    setting: str, tied: bool, tmp_path: Path
) -> None:
    """`save_pretrained` writes the trained values, in the format of one process."""
    settings = {**SETTINGS, **SETTINGS_OF_FOUR}[setting]
    if "dp_replicate_size" not in settings and "tp_size" not in settings:
        settings = {**settings, "fsdp_size": 4}
    source = written(tied, tmp_path)
    with fsdp2.replace_torch():
        model = load("fsdp2", source, **settings)
        run = train(model)
        model.save_pretrained(tmp_path / "whole")
    saved = plain_values(tmp_path / "whole")
    assert list(saved) == list(run.weights)
    for name, value in saved.items():
        assert torch.equal(value, run.weights[name]), name


@pytest.mark.parametrize("setting", ["plain", "replicated", "tensor parallel"])
@ranks(4)
def test_distributed_checkpoints_go_between_both_libraries(setting: str, tmp_path: Path) -> None:
    """What one saves shard by shard the other loads, on four shards too, and trains on alike."""
    source = written(False, tmp_path)
    settings = {**SETTINGS_OF_FOUR, "plain": {"fsdp_size": 4}}[setting]
    weights: dict[str, dict[str, Tensor]] = {}
    for library in LIBRARIES:
        with LIBRARIES[library]():
            model = load(library, source, **settings)
            weights[library] = train(model).weights
            model.save_pretrained(tmp_path / library, distributed_checkpoint=True)
            del model
    for library, saved in (("fsdp2", "fsdp2"), ("fsdp2", "torch"), ("torch", "fsdp2")):
        with LIBRARIES[library]():
            model = load(library, tmp_path / saved, fsdp_size=4)
            for name, value in names_of(model).items():
                assert torch.equal(whole(value), weights[saved][name]), name
            assert_trains(model)
            del model


def assert_trains(model: nn.Module) -> None:
    """Assert that a step changes the weights and gives a finite loss."""
    before = {name: whole(value).clone() for name, value in names_of(model).items()}
    run = train(model, range(1))
    assert run.losses[0].isfinite()
    assert any(not torch.equal(value, before[name]) for name, value in run.weights.items())


@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_tied_shards_in_host_memory_are_refused_by_safetensors(
    library: str, tmp_path: Path
) -> None:
    """Both names of a tie are written, and safetensors wants a copy for each.

    torch's writer copies what comes from a device, and what is part of a larger storage. Shards on
    a CPU that fill their storage, which is how both libraries make them, it hands on as they are.
    """
    with LIBRARIES[library]():
        model = seeded(lambda: llama(tied=True))
        torch_fsdp.fully_shard(model)
        writer = HuggingFaceStorageWriter(str(tmp_path / "shards"), save_distributed=True)
        with pytest.raises(dcp.CheckpointException, match="share memory"):
            dcp.save(get_model_state_dict(model), storage_writer=writer)
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "plain")


@ranks(2)
def test_a_tied_model_in_host_memory_is_saved_in_shards_by_torchs_own_only(tmp_path: Path) -> None:
    """torch's own holds parts of larger storages then, which the writer copies: see above."""
    source = written(True, tmp_path)
    for library in LIBRARIES:
        with LIBRARIES[library]():
            model = load(library, source, fsdp_size=2)
            train(model, range(1))
            if library == "torch":
                model.save_pretrained(tmp_path / library, distributed_checkpoint=True)
            else:
                with pytest.raises(dcp.CheckpointException, match="share memory"):
                    model.save_pretrained(tmp_path / library, distributed_checkpoint=True)
            model.save_pretrained(tmp_path / f"{library}-whole")
            del model
