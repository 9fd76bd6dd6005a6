"""Promise: between steps `parameters()` are the shards, and a forward uses what is in them.

"Between steps" is: no forward runs, none waits for its backward, and nobody called `unshard()`.
"""

from __future__ import annotations

import collections
import copy
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.behaviour.test_recovery import PHASES, ProvokedError, failing
from tests.kit.in_turn import advance
from tests.kit.local_sgd import LocalSGD
from tests.kit.models import Block, Case, Stack, each_block, floats, stack
from tests.kit.parity import Pair, assert_same_gradients, assert_sharded, make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

KINDS: dict[str, tuple[Case | str, dict[str, Any]]] = {
    "blocks": ("stack", {}),
    "kept": ("stack", {"reshard_after_forward": False}),
    "root_only": ("root_only", {}),
    "one_group": ("one_group", {}),
    "frozen": ("all_frozen_blocks", {}),
    "tied": ("tied_blocks", {}),
    "odd": ("few_rows", {}),
}


def step(pair: Pair) -> Tensor:
    return pair.run(pair.model, pair.local(pair.batch()))


def evaluate(pair: Pair, mode: Any = torch.no_grad) -> None:
    with mode():
        step(pair)


def failed(where: str, phase: str) -> Callable[[Pair], None]:
    def run(pair: Pair) -> None:
        with failing(pair.model.get_submodule(where), phase), pytest.raises(ProvokedError):
            step(pair).backward()

    return run


def loss_that_fails(pair: Pair) -> None:
    """The error is in what the user does with the outputs: no gradient reaches the model."""
    loss = step(pair)
    loss.register_hook(mock.Mock(side_effect=ProvokedError))
    with pytest.raises(ProvokedError):
        loss.backward()


def functional(pair: Pair, transform: str) -> None:
    """A transform over a call with whole parameters of the user's own."""
    batch = pair.local(pair.batch())
    own = {name: whole.clone() for name, whole in fsdp2.full_params(pair.model, max_bytes=10**6)}

    def loss(params: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(pair.model, params, batch.args)
        return output.square().mean()

    if transform == "grad":
        torch.func.grad(loss)(own)
    else:
        _, pull = torch.func.vjp(loss, own)
        if transform == "vjp":
            pull(torch.tensor(1.0))


def double_backward(pair: Pair) -> None:
    x = pair.local(pair.batch()).args[0].requires_grad_()
    (grad,) = torch.autograd.grad(pair.model(x).square().sum(), x, create_graph=True)
    assert grad.requires_grad


def without_resharding(pair: Pair) -> None:
    pair.model.set_reshard_after_backward(False)
    step(pair).backward()


def kept_and_evaluated(pair: Pair) -> None:
    pair.model.set_reshard_after_forward(False)
    evaluate(pair)


def frozen_forward(pair: Pair) -> None:
    """No backward can come of a forward in which nothing needs a gradient."""
    needs = {name: p.requires_grad for name, p in pair.model.named_parameters()}
    pair.model.requires_grad_(False)
    step(pair)
    assert_sharded(pair.model)
    for name, parameter in pair.model.named_parameters():
        parameter.requires_grad_(needs[name])


def unsharded_and_back(pair: Pair) -> None:
    pair.model.unshard()
    pair.model.reshard()


def unsharded_ahead(pair: Pair) -> None:
    """`unshard()` holds until the forward that it was for."""
    handle = pair.model.unshard(async_op=True)
    evaluate(pair)
    handle.wait()


def summoned(pair: Pair) -> None:
    with fsdp2.summon_full_params(pair.model):
        assert not any(isinstance(p, DTensor) for p in pair.model.parameters())


def interrupted(pair: Pair) -> None:
    handle = pair.model.register_forward_hook(mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        step(pair)
    handle.remove()


ACTIONS: dict[str, Callable[[Pair], Any]] = {
    "step": lambda pair: step(pair).backward(),
    "no_grad": evaluate,
    "inference": lambda pair: evaluate(pair, torch.inference_mode),
    "forward only": step,  # what it returns is dropped, and the graph with it
    **{f"fails {phase}": failed("blocks.1", phase) for phase in PHASES},
    "root fails backward": failed("out", "backward"),
    "loss fails": loss_that_fails,
    "grad": lambda pair: functional(pair, "grad"),
    "vjp": lambda pair: functional(pair, "vjp"),
    "vjp without backward": lambda pair: functional(pair, "none"),
    "double backward": double_backward,
    "no resharding": without_resharding,
    "kept": kept_and_evaluated,
    "frozen": frozen_forward,
    "unshard and reshard": unsharded_and_back,
    "unshard ahead": unsharded_ahead,
    "summon": summoned,
    "interrupt": interrupted,
    "state_dict": lambda pair: pair.model.state_dict(),
    "zero_grad": lambda pair: pair.model.zero_grad(),
    "eval": lambda pair: pair.model.eval().train(),
    "copy": lambda pair: copy.deepcopy(pair.model),
    "memory": lambda pair: pair.model.set_memory("low"),
    "full_params": lambda pair: list(fsdp2.full_params(pair.model, max_bytes=10**6)),
    "units": lambda pair: fsdp2.units(pair.model),
    "reset": lambda pair: pair.model.reset_iter_state(),
}


def check(action: str, case: Case | str, **kwargs: Any) -> None:
    """After the action an optimizer that is built at once trains the model as it should."""
    pair = Pair(case, **kwargs)
    pair.train(steps=1)
    shards = list(pair.model.parameters())
    ACTIONS[action](pair)
    assert_sharded(pair.model)
    assert all(a is b for a, b in zip(pair.model.parameters(), shards, strict=True))
    pair.model.zero_grad()
    for model, name in ((pair.model, "optimizer"), (pair.reference, "reference_optimizer")):
        trained = [p for p in model.parameters() if p.requires_grad]
        setattr(pair, name, LocalSGD(trained, lr=0.1))
    pair.train(steps=2)


@pytest.mark.parametrize(
    ("action", "kind"),
    with_slow(
        itertools.product(ACTIONS, KINDS),
        default=zip(ACTIONS, itertools.cycle(["blocks", "kept"])),
    ),
)
@ranks(slow(1), 2, slow(3))
def test_parameters_are_the_shards(action: str, kind: str) -> None:
    case, kwargs = KINDS[kind]
    if action in ("grad", "vjp", "vjp without backward") and kind == "tied":
        pytest.skip("a tied parameter has one value, under each of its names")
    check(action, case, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "action"),
    with_slow(itertools.product([None, 2], ACTIONS)),
)
@ranks(4)
def test_with_a_replicate_axis_and_smaller_meshes(choice: int | None, action: str) -> None:
    if choice is None:
        check(action, "stack", mesh=make_mesh(2, 2))
    else:
        check(action, "stack", reshard_after_forward=choice)


@ranks(2)
def test_units_that_some_ranks_may_skip() -> None:
    """The unit above moves a conditional one: what it shows, both show."""
    pair = Pair(Case(Stack, lambda model: [], floats))
    model = copy.deepcopy(pair.reference)
    for name in ("blocks.0", "blocks.1"):
        fsdp2.fully_shard(model.get_submodule(name), conditional=name == "blocks.1")
    fsdp2.fully_shard(model, reshard_after_forward=False)
    pair.model = model
    for action in ("fails backward", "no resharding", "kept", "forward only", "grad"):
        ACTIONS[action](pair)
        assert_sharded(model)


# --- values ---------------------------------------------------------------------------------------


WAYS: dict[str, Callable[[Any], Any]] = {
    "by_hand": lambda model: model.unshard(),
    "ahead": lambda model: model.unshard(async_op=True),
    "not_resharded": lambda model: model.set_reshard_after_backward(False),
}


@pytest.mark.parametrize(
    ("way", "kind"),
    with_slow(
        itertools.product(WAYS, ["plain", "foreach", "local", "fused"]),
        [
            ("by_hand", "local"),
            ("ahead", "plain"),
            ("not_resharded", "foreach"),
            ("not_resharded", "fused"),
        ],
    ),
)
@ranks(2)
def test_a_forward_uses_what_the_optimizer_wrote(way: str, kind: str) -> None:
    """However the parameters came to be whole before the step."""
    pair = Pair("stack")
    make: Callable[[Any], torch.optim.Optimizer] = {
        "plain": lambda ps: LocalSGD(ps, lr=0.1),
        "foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
        "local": lambda ps: fsdp2.optim.local(torch.optim.AdamW, ps, lr=0.01),
        "fused": lambda ps: fsdp2.optim.local(torch.optim.AdamW, ps, lr=0.01, fused=True),
    }[kind]
    pair.optimizer = make(pair.model.parameters())
    if kind in ("local", "fused"):
        pair.reference_optimizer = torch.optim.AdamW(pair.reference.parameters(), lr=0.01)
        pair.later_rtol = 1e-5
    for _ in range(3):
        pair.backward()
        pair.model.reshard()
        assert_same_gradients(pair.model, pair.reference, pair.rtol)
        WAYS[way](pair.model)
        advance(pair.optimizer, pair.reference_optimizer)
        pair.steps += 1
    pair.model.reshard()
    pair.check()


@ranks(4)
def test_written_shards_between_two_forwards_of_a_smaller_mesh() -> None:
    """Parameters that wait over fewer ranks are compared with their shards, too."""
    pair = Pair("stack", reshard_after_forward=2)
    pair.losses(pair.batch())
    with torch.no_grad():
        for optimizer in (pair.optimizer, pair.reference_optimizer):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(1.5)
    pair.train(steps=1)


@pytest.mark.parametrize("reshard", with_slow([None, False, 2], [2]))
@ranks(4)
def test_an_optimizer_that_would_train_nothing_says_so(reshard: bool | int | None) -> None:
    """One of before `fully_shard`, after `unshard()`, or between forward and backward."""
    early: list[LocalSGD] = []
    pair = Pair(
        "stack",
        prepare=lambda model: early.append(LocalSGD(model.parameters(), lr=0.1)),
        reshard_after_forward=reshard,
    )
    loss = step(pair)
    between = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    loss.backward()
    pair.model.unshard()
    held = fsdp2.optim.local(torch.optim.AdamW, pair.model.parameters())
    pair.model.reshard()
    early[0].step()  # of the reference
    pair.reference.zero_grad()
    for optimizer, what in (
        (early[1], r"inp\.weight as it was before fully_shard"),
        (between, "the unsharded form of" if reshard is not True else ""),
        (held, r"the unsharded form of inp\.weight"),
    ):
        with pytest.raises(fsdp2.StateError, match=what):
            optimizer.step()
    pair.model.zero_grad()
    pair.train(steps=1)


@ranks(2)
def test_a_held_unit_stays_whole_until_its_forward() -> None:
    pair = Pair("stack")
    pair.train(steps=1)
    block: Any = pair.model.blocks[0]
    block.unshard()
    assert not isinstance(block.up.weight, DTensor)
    with failing(pair.model.blocks[1], "before forward"), pytest.raises(ProvokedError):
        pair.model.blocks[1](torch.randn(2, block.up.in_features))
    evaluate(pair)
    assert_sharded(pair.model)
    block.unshard()
    pair.model.state_dict()
    assert_sharded(pair.model)


@ranks(2)
def test_a_backward_ends_what_unshard_holds() -> None:
    """Also where the unit keeps its memory: an optimizer that is made next holds shards."""
    for choice in (True, False):
        pair = Pair("stack")
        pair.model.set_reshard_after_backward(choice)
        for _ in range(2):
            for block in pair.model.blocks:
                block.unshard()
            losses = pair.losses()
            for block in pair.model.blocks:
                block.unshard()
                assert not isinstance(block.up.weight, DTensor)
            losses.backward()
            assert_sharded(pair.model)
            pair.step()
        pair.check()


@ranks(2)
def test_a_replaced_parameter_is_never_overwritten() -> None:
    """Between forward and backward, in the forward, while it is whole: the next forward has it."""

    class Replacing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training and hasattr(self, "fresh"):
                self.up.weight = self.fresh
                del self.fresh
            return y

    for where in ("blocks.0.up", "out"):
        for moment in ("after forward", "in forward", "after unshard"):
            pair = Pair(Case(stack(Replacing), each_block, floats))
            pair.train(steps=1)
            new = torch.randn(pair.reference.get_submodule(where).weight.shape)

            def replace(model: nn.Module, where: str = where, new: Tensor = new) -> None:
                setattr(model.get_submodule(where), "weight", nn.Parameter(new.clone()))  # noqa: B010

            models = (pair.model, pair.reference)
            if moment == "after unshard":
                (pair.model.blocks[0] if where != "out" else pair.model).unshard()  # type: ignore[operator]  # ours
                for model in models:
                    replace(model)
            elif moment == "after forward":
                losses = pair.losses(pair.batch())
                for model, loss in zip(models, losses, strict=True):
                    replace(model)
                    loss.backward()
            else:
                if where == "out":
                    continue
                for model in models:
                    model.blocks[0].fresh = nn.Parameter(new.clone())  # type: ignore[union-attr,index]  # a Module
                step(pair).backward()
                pair.run(pair.reference, pair.batch()).backward()
            for model in models:
                model.zero_grad()
            with torch.no_grad():
                pair.losses(pair.batch())
            pair.optimizer, pair.reference_optimizer = pair._optimizers()
            pair.train(steps=1)


@ranks(4)
def test_a_failed_backward_leaves_no_shards_of_a_smaller_mesh() -> None:
    """A gather that is on its way, from a few neighbours' shards, has registered nothing yet."""
    for action in ("fails backward", "root fails backward"):
        check(action, "stack", reshard_after_forward=2)


@ranks(1, 2)
@pytest.mark.parametrize("what", ["state_dict", "deepcopy", "save"])
def test_another_thread_disturbs_no_step(what: str, tmp_path: Path, rank: int) -> None:
    """It gets what is right between steps, or an error: never whole parameters, nor a broken step.

    What ranks do together it may not begin at all: every rank would have to do so at one place
    between the collectives of steps.
    """

    def trained(beside: Callable[[nn.Module], None] | None) -> list[float]:
        pair = Pair("stack")
        torch.manual_seed(7)
        done, found = threading.Event(), []
        optimizer = LocalSGD(pair.model.parameters(), lr=0.1)

        def go_on() -> None:
            while beside is not None and not done.is_set():
                beside(pair.model)

        thread = threading.Thread(target=go_on)
        for number in range(12):
            loss = step(pair).sum()
            loss.backward()
            advance(optimizer)
            found.append(loss.item())
            if number == 1:
                thread.start()
        done.set()
        thread.join()
        return found

    problems: list[str] = []
    refused = collections.Counter[str]()

    def look(model: nn.Module) -> None:
        try:
            if what == "state_dict":
                assert all(isinstance(value, DTensor) for value in model.state_dict().values())
            elif what == "deepcopy":
                copy.deepcopy(model)
            else:
                fsdp2.checkpoint.save(tmp_path / f"saved{rank}", model)
        except fsdp2.StateError as error:
            refused[error.code] += 1
        except BaseException as error:
            problems.append(repr(error))

    alone = trained(None)
    assert trained(look) == alone
    assert not problems
    assert set(refused) <= {"FS301"}
    if what == "save" and make_mesh().size() > 1:
        assert refused
        assert not list(tmp_path.iterdir())
