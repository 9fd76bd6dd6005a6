"""Promise: mixtures of experts of `transformers` train, however each rank's tokens are routed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

import fsdp2
from tests.ecosystem._programs import LENGTH, VOCABULARY, Program, each_layer, tokens, transformers
from tests.kit.models import Batch, Case, seeded
from tests.kit.parity import assert_same_parameters, shard, train_alike, whole
from tests.kit.pool import ranks

pytestmark = pytest.mark.ecosystem

EXPERTS = 5
BF16, FP32 = torch.bfloat16, torch.float32


def mixtral(kernel: str = "eager") -> nn.Module:
    """Build a Mixtral, which keeps all experts of a layer in two parameters.

    Its grouped kernel takes rows of a multiple of 16 bytes only, so its sizes are rounder.
    """
    grouped = kernel == "grouped_mm"
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=40 if grouped else 30,
        intermediate_size=40 if grouped else 37,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=64,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.1,
        output_router_logits=False,  # no auxiliary loss: it is no mean over rows
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._experts_implementation = kernel
    return transformers.MixtralForCausalLM(config)


def switch() -> nn.Module:
    """Build a Switch Transformer, whose experts are modules of their own."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=30,
        d_kv=6,
        d_ff=37,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=5,
        num_experts=EXPERTS,
        expert_capacity=1000,
        router_bias=True,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        initializer_factor=0.5,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def each_layer_and_its_experts(model: nn.Module) -> Sequence[nn.Module]:
    return [*experts_of(model), *each_layer(model)]


def each_block(model: nn.Module) -> Sequence[nn.Module]:
    return [*model.encoder.block, *model.decoder.block]


def each_expert_and_block(model: nn.Module) -> Sequence[nn.Module]:
    return [e for experts in experts_of(model) for e in experts.values()] + [*each_block(model)]


def one_token_a_rank(rows: int) -> Batch:
    """Return rows in which every rank's tokens are equal, so that they go to the same experts."""
    count = dist.get_world_size()
    ids = torch.randint(3, VOCABULARY, (count,)).repeat_interleave(rows // count)
    ids = ids[:, None].expand(rows, LENGTH).contiguous()
    return Batch((), {"input_ids": ids, "labels": ids})


class Routes:
    """How many tokens each expert got in this rank's forwards: counts for each layer of experts."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: list[list[int]] = []
        for experts in experts_of(model):
            experts.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: object) -> None:
        selected = args[1]
        if isinstance(module, nn.ModuleDict):  # one-hot
            counts = selected.flatten(0, -2).sum(0)
        else:
            counts = selected.flatten().bincount(minlength=EXPERTS)
        self.counts.append(counts.tolist())

    def take(self) -> list[list[int]]:
        """Return what was noted since the last time, and start again."""
        counts, self.counts = self.counts, []
        return counts


def used_in(counts: list[int]) -> set[int]:
    return {expert for expert, count in enumerate(counts) if count}


def gathered(counts: list[list[int]]) -> list[tuple[list[int], ...]]:
    """Return every rank's counts, layer by layer."""
    everywhere: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, counts)
    return list(zip(*everywhere, strict=True))


UNITS = {"layers": each_layer, "experts": each_layer_and_its_experts}
KERNELS = ["eager", "grouped_mm"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("units", UNITS)
@ranks(2, 3)
def test_experts_in_one_parameter_train_like_the_unsharded_model(units: str, kernel: str) -> None:
    """Mixtral, with batches routed differently on each rank, trains as on the global batch."""
    program = Program(Case(partial(mixtral, kernel), UNITS[units], tokens))
    routes = Routes(program.model)
    program.train(steps=4)
    counts = gathered(routes.take())
    assert len(counts) == 8
    assert all(layer[0] != layer[1] for layer in counts), "ranks routed alike"


@pytest.mark.parametrize("kernel", KERNELS)
@ranks(2, 3)
def test_experts_without_a_token_on_one_rank_or_on_all(kernel: str) -> None:
    """Ranks that use two of five experts each train Mixtral as on the global batch.

    The rows of experts that no rank used get zeros, as in the plain model, which has one parameter
    for all of them.
    """
    program = Program(Case(partial(mixtral, kernel), each_layer, one_token_a_rank))
    routes = Routes(program.model)
    differ, idle = 0, 0
    for _ in range(4):
        program.backward()
        everywhere = gathered(routes.take())
        for experts, counts in zip(experts_of(program.model), everywhere, strict=True):
            used = [used_in(one) for one in counts]
            assert all(len(one) == 2 for one in used)
            differ += any(one != used[0] for one in used)
            nobody = sorted(set(range(EXPERTS)) - set.union(*used))
            idle += len(nobody)
            gradient = whole(experts.down_proj.grad)
            touched = gradient.flatten(1).any(1).nonzero().flatten().tolist()
            assert touched == sorted(set.union(*used))
            assert not gradient[nobody].any()
        program.step()
    program.check()
    assert differ > 0, "every rank used the same experts"
    assert idle > 0, "every expert was used"


@pytest.mark.parametrize("how", ["eager", "checkpointed"])
@ranks(2)
def test_experts_as_modules_train_like_the_unsharded_model(how: str) -> None:
    """Switch, whose experts are modules inside a unit, trains with idle experts on any rank.

    An expert that one rank leaves idle gets the others' gradient; one that all leave idle has none.
    """

    def enable(model: nn.Module) -> None:
        if how == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})

    program = Program(Case(switch, each_block, one_token_a_rank), prepare=enable)
    routes = Routes(program.model)
    differ, idle = 0, 0
    for _ in range(4):
        program.backward()
        everywhere = gathered(routes.take())
        for experts, counts in zip(experts_of(program.model), everywhere, strict=True):
            used = [used_in(one) for one in counts]
            differ += any(one != used[0] for one in used)
            nobody = set(range(EXPERTS)) - set.union(*used)
            idle += len(nobody)
            for index, expert in enumerate(experts.values()):
                for parameter in expert.parameters():
                    assert (parameter.grad is None) == (index in nobody)
        program.step()
    program.check()
    assert differ > 0, "every rank used the same experts"
    assert idle > 0, "every expert was used"


def bar(model: nn.Module, barred: int) -> None:
    """Bias the routers so that one expert gets no token."""
    for name, parameter in model.named_parameters():
        if name.endswith("router.classifier.bias"):
            with torch.no_grad():
                parameter[barred] = -1e4


def batch_that_uses(wanted: set[int], program: Program, routes: Routes) -> Batch:
    """Draw batches until every rank's part uses the same experts in the plain model."""
    for _ in range(200):
        batch = program.batch()
        routes.take()
        with torch.no_grad():
            program.run_parts(batch)
        if all(used_in(counts) == wanted for counts in routes.take()):
            return batch
    raise AssertionError(f"no batch whose every part uses {wanted}")


@ranks(2, 3)
def test_each_expert_is_a_unit() -> None:
    """Experts that are units train as plain ones, where each rank uses the same ones of them.

    A unit that only some ranks run is another matter, and not tested here.
    """
    case = Case(switch, each_expert_and_block, tokens)
    program = Program(case, prepare=partial(bar, barred=3))
    routes, wanted = Routes(program.model), Routes(program.reference)
    for _ in range(4):
        program.backward(batch_that_uses({0, 1, 2, 4}, program, wanted))
        assert [used_in(counts) for counts in routes.take()] == [{0, 1, 2, 4}] * 2
        for experts in experts_of(program.model):
            assert all(p.grad is None for p in experts["expert_3"].parameters())
        program.step()
    program.check()


@pytest.mark.parametrize("kernel", KERNELS)
@ranks(2)
def test_mixtral_in_bf16_trains_like_torch(kernel: str) -> None:
    """bf16 experts in a unit inside a unit give losses, gradients and weights of torch's own."""
    case = Case(partial(mixtral, kernel), each_layer_and_its_experts, tokens)
    train_alike(case, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))


@ranks(2)
def test_a_router_in_fp32_is_a_unit_without_a_policy(rank: int) -> None:
    """Switch casts its routers to fp32 in forward: units without a policy, they train as in torch.

    In a bf16 unit neither this package nor torch's own lets a forward cast a parameter.
    """
    models, optimizers, dtypes = [], [], []
    for library in (fsdp2, torch_fsdp):
        model = seeded(switch)
        policy = library.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        for name, module in model.named_modules():
            if name.endswith("router.classifier"):
                module.register_forward_pre_hook(lambda m, args: dtypes.append(m.weight.dtype))
                library.fully_shard(module)
        models.append(shard(model, Case(switch, each_block, tokens), library, mp_policy=policy))
        if library is torch_fsdp:
            model.set_reduce_scatter_unused_params(True)  # each rank has idle experts of its own
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        batch = tokens(6).chunk(rank, 2)
        losses = [model(**batch.kwargs).loss for model in models]
        assert torch.equal(losses[0], losses[1])
        for model, loss, optimizer in zip(models, losses, optimizers, strict=True):
            loss.backward()
            assert model.decoder.block[1].layer[2].mlp.router.classifier.weight.grad.dtype is FP32
            optimizer.step()
            optimizer.zero_grad()
    assert dtypes == [FP32] * 12
    assert_same_parameters(*models)
