"""Promise: a sharded model compiled whole trains like the unsharded one, in one graph each way."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._compiled.compile import check_mode
from fsdp2._compiled.passes import Overlapped
from fsdp2._core.base.policy import Overlap
from tests.kit.calls import Gather
from tests.kit.in_turn import shard_each
from tests.kit.models import (
    CASES,
    EVERY_KIND,
    HIDDEN,
    NARROW,
    WIDTH,
    Batch,
    Block,
    Case,
    Scalars,
    Stack,
    each_block,
    first_blocks,
    floats,
    loss_of,
    seeded,
)
from tests.kit.parity import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    make_mesh,
    names_of,
    shard,
    sharded,
)
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import slow
from tests.kit.traced import TracedPair, saved

ONE_BLOCK, TWO_BLOCKS = (first_blocks(CASES["stack"], count) for count in (1, 2))
DIFFERENT_BLOCKS = {  # each has a part of its own, or no list of blocks
    "tied_lm",
    "untied_lm",
    "tied_blocks",
    "shared_block",
    "containers",
    "nested_units",
    "one_group",
    "unused_parts",
    "sequential",
}


def shorter(name: str, count: int) -> Case:
    """Return the case with fewer blocks, where they are alike: the compiler's time goes with them.

    What several blocks are to each other, bodies with all three of ``stack`` look at.
    """
    return CASES[name] if name in DIFFERENT_BLOCKS else first_blocks(CASES[name], count)


@ranks(2, limit_s=200)
def test_five_steps() -> None:
    """Losses and gradients are the unsharded model's, from two graphs.

    One body for several promises, because compiling is what takes the time.
    """
    pair = TracedPair("stack")
    pair.train(steps=5)
    expected = "forward: 4 all_gather\nbackward: 3 all_gather, 4 reduce_scatter"
    assert pair.graphs.describe() == expected  # the root stays whole for its backward
    saves_no_weight_of_a_block(pair)
    collectives_may_be_moved(pair)
    assert pair.graphs.counts == "1 forward, 1 backward"


@ranks(2, limit_s=200)
def test_what_may_come_between_steps() -> None:
    """Nothing of it disturbs the graphs: one more pair of them, and one of evaluation, are made."""
    pair = TracedPair(TWO_BLOCKS)
    pair.train(steps=2)
    gradients_that_wait_for_sync_are_not_lost(pair)
    eager_steps_and_evaluation_come_between(pair)
    an_exception_leaves_the_model_sharded(pair)
    assert pair.graphs.counts == "3 forward, 2 backward"
    assert pair.graphs.frames == 3  # training, with gradients that waited, evaluation


@ranks(1)
def test_methods_that_return_the_module_return_the_compiled_one() -> None:
    """`model = model.eval()` must not leave the compiled model behind."""
    model = Stack(Scalars, count=1)
    fsdp2.fully_shard(model)
    compiled = fsdp2.compile(model)
    for chained in (
        compiled.train(),
        compiled.eval(),
        compiled.requires_grad_(True),
        compiled.to("cpu"),
        compiled.apply(lambda module: None),
    ):
        assert chained is compiled


def order_of(graph: Any) -> str:
    """Write the collectives of a graph, their waits and the products between them, in order."""
    short = {
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "reduce",
        "wait_tensor": "wait",
        "addmm": "mm",
        "mm": "mm",
    }
    short |= {f"{name}_coalesced": word for name, word in short.items()}
    words: list[str] = []
    for node in graph.graph.nodes:
        parts = str(node.target).split(".")
        word = short.get(parts[1]) if len(parts) > 2 else None
        if word == "wait":
            of = node.args[0].args[0] if node.args[0].target is operator.getitem else node.args[0]
            word = f"wait_{short[str(of.target).split('.')[1]]}"
            if words[-1:] == [word]:
                continue  # one for each piece
        if word is not None and (word != "mm" or "mm" not in words[-1:]):
            words.append(word)
    return " ".join(words)


def saves_no_weight_of_a_block(pair: TracedPair) -> None:
    shapes = {tuple(value.shape) for value in saved(pair.graphs.forward[0], outputs=1)}
    for rows, columns in ((HIDDEN, WIDTH), (NARROW, HIDDEN)):
        assert not shapes & {(rows, columns), (columns, rows), (rows * columns,)}


def an_exception_leaves_the_model_sharded(pair: TracedPair) -> None:
    with pytest.raises(RuntimeError):
        pair.compiled(torch.randn(4, 5))
    pair.check()
    pair.train(steps=1)


def gradients_that_wait_for_sync_are_not_lost(pair: TracedPair) -> None:
    """Eager ones are joined by a compiled step; a forward without backward gives them back."""
    pair.eagerly = True
    pair.model.set_requires_gradient_sync(False)
    pair.backward()
    pair.model.set_requires_gradient_sync(True)
    pair.eagerly = False
    pair.compiled(*pair.local(pair.batch()).args)
    pair.backward()
    pair.step()
    pair.check()


def eager_steps_and_evaluation_come_between(pair: TracedPair) -> None:
    """Compiled and eager steps of one model mix; evaluation takes one more graph."""
    for eagerly in (False, True, False, False, True):
        pair.eagerly = eagerly
        pair.backward()
        pair.step()
        pair.compiled.eval()
        assert not pair.model.training
        with torch.no_grad():
            pair.losses(pair.batch())
        pair.compiled.train()
    pair.check()
    pair.eagerly = False


def collectives_may_be_moved(pair: TracedPair) -> None:
    """The pass starts a gather one group ahead, and waits for a reduction where the next starts."""
    graphs = (pair.graphs.forward[0], pair.graphs.backward[0])
    orders = [order_of(graph) for graph in graphs]
    pair.graphs.change(Overlapped(Overlap()))
    pair.train(steps=2)
    orders += [order_of(graph) for graph in graphs]
    assert_expected_inline(
        "\n".join(orders),
        """\
gather wait_gather mm gather wait_gather mm gather wait_gather mm gather wait_gather mm
mm gather wait_gather mm wait_gather mm wait_gather mm wait_gather reduce wait_reduce gather wait_gather mm wait_gather mm wait_gather mm wait_gather reduce wait_reduce gather wait_gather mm wait_gather mm wait_gather mm wait_gather reduce wait_reduce mm reduce wait_reduce
gather gather wait_gather mm gather wait_gather mm wait_gather mm wait_gather mm gather wait_gather mm wait_gather mm wait_gather mm wait_gather mm wait_gather mm wait_gather mm wait_gather mm
gather mm gather wait_gather mm wait_gather mm wait_gather mm wait_gather reduce gather wait_gather mm wait_gather mm wait_gather mm wait_gather reduce wait_gather mm wait_gather mm wait_gather mm wait_gather wait_reduce reduce mm wait_reduce reduce wait_reduce""",  # noqa: E501  # one graph a line
    )


@pytest.mark.parametrize("name", CASES)
@ranks(slow(1), slow(2), slow(3), limit_s=200)
def test_every_case(name: str) -> None:
    pair = TracedPair(shorter(name, 3 if name == "stack" else 2))
    pair.train(steps=3)
    assert pair.graphs.counts == "1 forward, 1 backward"


BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
BF16_OUT = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


class EagerTwin(TracedPair):
    """A compiled sharded model beside the same one run eagerly: policies round alike."""

    def __init__(self, name: Case | str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)
        shard(self.reference, self.case, mesh=kwargs.get("mesh"), **without_mesh(kwargs))
        self.reference_optimizer = self._optimizers()[1]

    def run_reference(self, batch: Batch) -> Tensor:
        return self.run(self.reference, self.local(batch))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, expected = self.run(self.model, self.local(batch)), self.run_reference(batch)
        assert_same(loss, expected, "loss", self.rtol)
        return loss, expected


def without_mesh(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name in ("mp_policy",)}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        slow("containers", BF16),
        slow("stack", FP16),
        ("stack of one", BF16),
        slow("root_only", BF16_OUT),
    ],
)
@ranks(2, limit_s=200)
def test_mixed_precision(name: str, policy: fsdp2.MixedPrecisionPolicy) -> None:
    one = Case(lambda: Stack(Block, count=1), each_block, floats)
    pair = EagerTwin(one if name == "stack of one" else shorter(name, 2), mp_policy=policy)
    pair.first_rtol = pair.later_rtol = 2e-2
    for _ in range(3):
        pair.backward()
        pair.step()
    assert_same_parameters(pair.model, pair.reference, 2e-2)
    assert pair.graphs.counts == "1 forward, 1 backward"


@ranks(2, limit_s=200)
def test_a_replicate_axis() -> None:
    """A mesh that only replicates, and one block, because each rank compiles; more is below."""
    case = Case(lambda: Stack(Scalars, count=1), each_block, floats)
    TracedPair(case, mesh=make_mesh(2, 1)).train(steps=2)


@pytest.mark.parametrize("name", ["scalars", slow("stack"), "mixed_dtypes"])
@ranks(slow(4), limit_s=200)
def test_more_with_a_replicate_axis(name: str) -> None:
    """Blocks of ``scalars`` are those of ``stack`` with two parameters more."""
    TracedPair(shorter(name, 2), mesh=make_mesh(2, 2)).train(steps=2)


@pytest.mark.parametrize("choice", [2, True, False])
@ranks(slow(4), limit_s=200)
def test_each_way_to_reshard(choice: bool | int) -> None:
    pair = TracedPair(first_blocks(CASES["nested_units"], 1), reshard_after_forward=choice)
    pair.train(steps=2)
    assert (
        pair.graphs.describe()
        == {
            True: "forward: 3 all_gather\nbackward: 3 all_gather, 3 reduce_scatter",
            False: "forward: 3 all_gather\nbackward: 3 reduce_scatter",
            # over the neighbours' peers, then over the neighbours, who gather again
            2: "forward: 6 all_gather\nbackward: 3 all_gather, 3 reduce_scatter",
        }[choice]
    )


class Checkpointed(Stack):
    """Recomputes every block outside of its unit, or what is inside of it."""

    def __init__(
        self, where: str, make_block: Callable[[], nn.Module] = Block, count: int = 3
    ) -> None:
        super().__init__(InsideCheckpointed if where == "inside" else make_block, count)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.where == "inside" else checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class InsideCheckpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


class CallsMethod(Stack):
    """Calls a method of its blocks beside forward; may recompute it, outside of their units."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__(MethodBlock)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block.run, x, use_reentrant=False) if self.recomputes else block.run(x)
        return self.out(x)


class MethodBlock(Block):
    def run(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Breaking(Stack):
    """Breaks the graph between units, and one of its blocks does inside of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = BreakingBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inp(x))
        torch._dynamo.graph_break()
        return self.out(self.blocks[2](self.blocks[1](x)))


class BreakingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return self.down(self.mid(x))


@ranks(slow(2), limit_s=200)
def test_graph_breaks_change_no_number() -> None:
    """What is not in a graph runs the same functions eagerly."""
    pair = TracedPair(Case(Breaking, each_block, floats), fullgraph=False)
    pair.train(steps=3)
    assert pair.graphs.frames > 1


@pytest.mark.parametrize("name", ["unused_parts", pytest.param("scalars", marks=pytest.mark.slow)])
@ranks(2, limit_s=200)
def test_without_a_compiler(name: str) -> None:
    """The functional step trains as it stands, too; what took no part has no gradient."""
    pair = TracedPair(name)
    pair.compiled = fsdp2.compile(pair.model, disable=True)
    pair.train(steps=3)


@pytest.mark.parametrize("conditional", [False, True])
@ranks(slow(2), limit_s=200)
def test_units_below_a_plain_root_and_conditional_ones(conditional: bool) -> None:
    """Units are compiled with what is around them, sharded or not.

    What the unit above gathers for a conditional one is there when that one runs.
    """
    pair = TracedPair("stack")
    model = seeded(pair.case.build)
    for index, block in enumerate(each_block(model)):
        fsdp2.fully_shard(block, conditional=conditional and index == 1)
    if conditional:
        fsdp2.fully_shard(model)
    compiled = fsdp2.compile(model, backend=pair.graphs, fullgraph=True)
    for _ in range(2):
        batch = pair.batch()
        loss_of(compiled(*pair.local(batch).args)).backward()
        pair.run_reference(batch).backward()
        trees = [[m] if conditional else each_block(m) for m in (model, pair.reference)]
        for unit, expected in zip(*trees, strict=True):
            assert_same_gradients(unit, expected)
    assert pair.graphs.counts == "1 forward, 1 backward"


@ranks(slow(2), limit_s=200)
def test_a_first_call_in_inference_mode() -> None:
    pair = TracedPair(TWO_BLOCKS)
    with torch.inference_mode():
        pair.losses(pair.batch())
    pair.train(steps=2)


@pytest.mark.parametrize("where", ["outside", pytest.param("inside", marks=pytest.mark.slow)])
@ranks(2, limit_s=200)
def test_activation_checkpointing(where: str) -> None:
    pair = TracedPair(Case(lambda: Checkpointed(where, count=2), each_block, floats))
    pair.train(steps=2)
    assert pair.graphs.counts == "1 forward, 1 backward"
    expected = "forward: 3 all_gather\nbackward: 2 all_gather, 3 reduce_scatter"
    assert pair.graphs.describe() == expected


@ranks(slow(2), limit_s=200)
def test_batch_sizes_may_change() -> None:
    """One graph serves every batch size, if dynamic shapes are asked for."""
    pair = TracedPair(ONE_BLOCK, dynamic=True)
    for rows in (12, 24, 8):
        pair.backward(pair.case.batch(rows))
        pair.step()
    pair.check()
    assert pair.graphs.counts == "1 forward, 1 backward"


@ranks(slow(2), limit_s=200)
def test_backwards_in_another_order_than_forwards() -> None:
    """An eager and a compiled forward of one model may wait for their backwards together."""
    pair = TracedPair(TWO_BLOCKS)
    first, second = pair.batch(), pair.batch()
    losses = []
    for batch, pair.eagerly in ((first, True), (second, False), (first, False)):
        losses.append(pair.losses(batch))
    for loss, expected in losses:
        loss.backward()
        expected.backward()
    pair.step()
    pair.check()


@ranks(slow(2), limit_s=200)
def test_several_microbatches() -> None:
    """Gradients of several backwards add up; those without sync send nothing, in graphs too."""
    pair = TracedPair("stack")
    for eagerly in (False, False, True):
        for is_last in (False, False, True):
            pair.model.set_requires_gradient_sync(is_last)
            pair.eagerly = eagerly and not is_last
            pair.backward()
        pair.step()
        pair.check()
    assert pair.graphs.describe().splitlines() == [
        *["forward: 4 all_gather"] * 2,
        "backward: 3 all_gather",
        "backward: 3 all_gather, 4 reduce_scatter",
    ]


class Turns(Stack):
    """Leaves out its last block when it is told to."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks[: -1 if self.skips else None]:
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize("fullgraph", [True, False])
@ranks(slow(2), limit_s=200)
def test_gradients_that_wait_of_units_that_the_last_step_did_not_use(fullgraph: bool) -> None:
    """They are reduced at the end of that backward, though no graph does it."""
    pair = TracedPair(
        Case(functools.partial(Turns, count=2), each_block, floats), fullgraph=fullgraph
    )
    for skips in (False, True, True):
        pair.model.set_requires_gradient_sync(skips)
        pair.model.skips = pair.reference.skips = skips
        pair.backward()
        if skips:
            assert_same_gradients(pair.model, pair.reference, 4e-6)
    pair.step()
    pair.check()


class Sums(nn.Module):
    """Two parameters that get one and the same tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(13, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.a + self.b).t())


@ranks(slow(1), slow(2), limit_s=200)
def test_gradients_that_a_graph_returns_once_for_two_parameters() -> None:
    """What is done to one of them in place is done to that one only."""
    pair = TracedPair(Case(Sums, lambda model: [], floats))
    for is_last in (False, False, True):
        pair.model.set_requires_gradient_sync(is_last)
        pair.backward()
    assert_same_gradients(pair.model, pair.reference, 4e-6)
    for model in (pair.model, pair.reference):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    assert_same_gradients(pair.model, pair.reference, 4e-6)


@pytest.mark.parametrize("fullgraph", [True, False])
@ranks(slow(2), limit_s=200)
def test_sync_that_is_switched_on_between_forward_and_backward(fullgraph: bool) -> None:
    """The backward decides, as in eager mode: schedules of pipelines ask then."""
    pair = TracedPair(TWO_BLOCKS, fullgraph=fullgraph)
    for microbatches in ((False, True), (True,)):
        for is_last in microbatches:
            pair.model.set_requires_gradient_sync(False)
            batch = pair.batch()
            loss = loss_of(pair.compiled(*pair.local(batch).args))
            pair.model.set_requires_gradient_sync(is_last)
            loss.backward()
            pair.run_reference(batch).backward()
        assert_same_gradients(pair.model, pair.reference, 4e-6)
        pair.step()
    pair.check()


@ranks(slow(2), limit_s=200)
def test_a_forward_that_fails_takes_no_gradient_that_waits() -> None:
    """Not even from the next step, if that is an eager one."""
    for eagerly in (True, False):
        pair = TracedPair(ONE_BLOCK)
        pair.train(steps=1)
        pair.model.set_requires_gradient_sync(False)
        pair.backward()
        pair.model.set_requires_gradient_sync(True)
        try:
            pair.compiled(torch.randn(4, 5))
        except RuntimeError as error:
            raised = error  # with its frames, while the next step runs
        pair.eagerly = eagerly
        pair.backward()
        assert_same_gradients(pair.model, pair.reference, 4e-6)
        assert raised is not None
        torch.compiler.reset()


@ranks(slow(2), limit_s=200)
def test_gradients_that_travel_in_another_dtype() -> None:
    """`set_gradient_wire_dtype` holds in graphs: an exchange, and a sum in the reduce dtype."""
    pair = TracedPair(ONE_BLOCK)
    pair.model.set_gradient_wire_dtype(torch.bfloat16)
    pair.first_rtol = pair.later_rtol = 3e-2
    pair.backward()
    assert "reduce_scatter" not in pair.graphs.describe()
    assert "all_to_all_single" in pair.graphs.describe()
    assert_same_gradients(pair.model, pair.reference, 3e-2)


@ranks(slow(2), limit_s=200)
def test_shards_that_are_offloaded() -> None:
    pair = TracedPair(shorter("scalars", 1), offload_policy=fsdp2.CPUOffloadPolicy())
    pair.train(steps=3)


@ranks(slow(2), limit_s=200)
def test_state_and_optimizers_in_between() -> None:
    """The compiled model has the model's names and state; loading into it is seen by its graphs."""
    pair = TracedPair("few_rows", optimizer=torch.optim.Adam)
    names = list(names_of(pair.model))
    assert [name for name, _ in pair.compiled.named_parameters()] == names
    assert list(pair.compiled.state_dict()) == list(pair.reference.state_dict())
    assert next(pair.compiled.parameters()) is next(pair.model.parameters())
    kept = {name: value.clone() for name, value in pair.compiled.state_dict().items()}
    kept_reference = copy.deepcopy(pair.reference.state_dict())
    pair.backward()
    pair.step()
    for assign in (False, True):
        pair.compiled.load_state_dict({n: v.clone() for n, v in kept.items()}, assign=assign)
        pair.reference.load_state_dict(kept_reference)
        pair.backward()
        assert_same_gradients(pair.model, pair.reference)
        pair.compiled.zero_grad()
        pair.reference.zero_grad()
    assert pair.graphs.counts == "1 forward, 1 backward"
    again = copy.deepcopy(pair.compiled)
    assert next(again.parameters()) is not next(pair.model.parameters())
    again.load_state_dict(pair.compiled.state_dict())
    batch = pair.local(pair.batch())
    assert_same(again(*batch.args), pair.compiled(*batch.args), "output")


@ranks(slow(2), limit_s=200)
def test_what_is_trained_may_change() -> None:
    """Freezing takes new graphs once, and going back takes the old ones."""
    pair = TracedPair(TWO_BLOCKS)
    for _ in range(2):
        for flag in (True, False):
            for model in (pair.model, pair.reference):
                model.blocks[1].up.weight.requires_grad_(flag)  # type: ignore[index, union-attr]
            pair.backward()
            pair.step()
    assert pair.graphs.counts == "2 forward, 2 backward"


@ranks(slow(2), limit_s=200)
def test_the_divisor_of_gradients() -> None:
    pair = TracedPair(TWO_BLOCKS)
    for unit in (*pair.model.blocks, pair.model):  # type: ignore[misc]  # a ModuleList
        unit.set_gradient_divide_factor(1.0)
    pair.backward()
    for parameter in pair.reference.parameters():
        parameter.grad *= 2.0
    pair.step()
    pair.check()


@ranks(slow(2), limit_s=200)
def test_registered_forward_methods() -> None:
    pair = TracedPair(Case(functools.partial(CallsMethod, False), each_block, floats))
    for block in pair.model.blocks:  # type: ignore[union-attr]  # a ModuleList
        fsdp2.register_fsdp_forward_method(block, "run")
    pair.train(steps=2)
    assert pair.graphs.counts == "1 forward, 1 backward"


@ranks(slow(2), limit_s=200)
def test_gradient_hooks_of_users() -> None:
    """Hooks on a parameter see its reduced gradient, as they do eagerly."""
    pair = TracedPair(ONE_BLOCK)
    seen: list[str] = []
    weight = pair.model.inp.weight
    weight.register_hook(lambda grad: seen.append(f"hook {type(grad).__name__}"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"after {p.grad is not None}"))
    pair.train(steps=2)
    assert seen == ["hook DTensor", "after True"] * 2


@pytest.mark.parametrize("choice", [True, 2, False])
@ranks(slow(4), limit_s=200)
def test_what_is_saved_for_backward(choice: bool | int) -> None:
    """No whole weight is kept from forward to backward, unless the unit does not reshard."""
    pair = TracedPair(TWO_BLOCKS, reshard_after_forward=choice)
    pair.backward(pair.case.batch(4))  # one row a rank: activations are smaller than weights
    (graph,) = pair.graphs.forward
    largest = max(saved(graph, outputs=1), key=lambda value: value.numel())
    weight = WIDTH * HIDDEN  # of a block's first layer
    half = -(-HIDDEN // 4) * 2 * WIDTH  # of its largest weight, which travels by itself
    assert largest.numel() == {True: HIDDEN, 2: half, False: weight}[choice]


def forward_hook(model: Any) -> None:
    model.blocks[1].set_all_reduce_hook(lambda tensor: None)


def custom_gather(model: Any) -> None:
    model.blocks[1].set_custom_all_gather(Gather())


@ranks(2)
def test_what_no_graph_can_hold_is_refused_by_name() -> None:
    case, x = CASES["stack"], torch.randn(4, WIDTH)
    for change, found in ((forward_hook, "an all-reduce hook"), (custom_gather, "a custom all-")):
        model = sharded(case)
        compiled = fsdp2.compile(model, backend="eager")
        change(model)
        for call in (lambda: fsdp2.compile(model), lambda: compiled(x)):  # noqa: B023  # at once
            with pytest.raises(fsdp2.UnsupportedError, match=rf"blocks\.1 .*{found}"):
                call()
        assert_sharded(model)
    model = sharded(case)
    compiled = fsdp2.compile(model, disable=True)
    with (
        pytest.warns(UserWarning, match="results are wrong"),
        fsdp2.debug.without_communication(model),
        pytest.raises(fsdp2.UnsupportedError, match="without_communication is on"),
    ):
        compiled(x)
    with pytest.raises(fsdp2.ConfigError, match="no sharded module in Linear"):
        fsdp2.compile(torch.nn.Linear(2, 2))


@ranks(2)
def test_compiled_models_in_models() -> None:
    """A compiled model is compiled anew, a part of a model that is compiled is refused."""
    model = sharded("stack")
    compiled = fsdp2.compile(model, disable=True)
    assert signature(compiled.forward) == signature(model.forward)
    x = torch.randn(4, WIDTH)
    again = fsdp2.compile(compiled, disable=True)
    assert_same(again(x), compiled(x), "output")
    block = model.blocks[1]  # type: ignore[index]  # a ModuleList
    model.blocks[1] = fsdp2.compile(block, disable=True)  # type: ignore[index, operator]
    with pytest.raises(fsdp2.ConfigError, match=r"blocks contains a compiled model, 1"):
        fsdp2.compile(model)


@ranks(2)
def test_recomputation_outside_of_graphs() -> None:
    """Checkpointing that no compiler traced runs units again in backward, and leaves no trace."""
    pair = TracedPair(Case(functools.partial(CallsMethod, True), each_block, floats))
    pair.compiled = fsdp2.compile(pair.model, disable=True)
    for block in pair.model.blocks:  # type: ignore[union-attr]  # a ModuleList
        fsdp2.register_fsdp_forward_method(block, "run")
    pair.backward()
    assert_sharded(pair.model)
    pair.step()
    pair.train(steps=2)
    pair.eagerly = True
    pair.train(steps=1)


@ranks(2)
def test_inputs_are_cast_as_in_an_eager_step() -> None:
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, cast_forward_inputs=False, cast_root_forward_inputs=True
    )
    model = sharded("stack", mp_policy=policy)
    x = torch.randn(4, WIDTH)
    assert_same(fsdp2.compile(model, disable=True)(x), model(x), "output")


@ranks(2)
def test_a_backward_of_parameters_that_were_frozen_since() -> None:
    """Gradients laid out for others are not taken, however many compiled forwards came between."""
    model = sharded("stack")
    compiled = fsdp2.compile(model, disable=True)
    loss = loss_of(compiled(torch.randn(4, WIDTH)))
    model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    loss_of(compiled(torch.randn(4, WIDTH)))
    with pytest.raises(fsdp2.StateError, match=r"blocks\.1: requires_grad changed"):
        loss.backward()


@pytest.mark.parametrize(
    ("mode", "options"),
    [("reduce-overhead", None), ("max-autotune", None), (None, {"triton.cudagraphs": True})],
)
def test_cuda_graphs_are_refused(mode: str | None, options: dict[str, bool] | None) -> None:
    check_mode(mode, options, torch.device("cpu"))
    check_mode("max-autotune-no-cudagraphs", None, torch.device("cuda"))
    with pytest.raises(fsdp2.UnsupportedError, match="CUDA graphs"):
        check_mode(mode, options, torch.device("cuda"))


@ranks(slow(2), limit_s=200)
def test_collectives_for_each_parameter() -> None:
    pair = TracedPair("scalars", bucket=False)
    pair.train(steps=2)
    expected = "forward: 28 all_gather\nbackward: 15 all_gather, 34 reduce_scatter"
    assert pair.graphs.describe() == expected  # backward needs no bias, and gathers none


@pytest.mark.parametrize("name", ["mixed_dtypes", "non_contiguous", "few_rows"])
@ranks(slow(3), limit_s=200)
def test_collectives_for_each_odd_parameter(name: str) -> None:
    TracedPair(shorter(name, 1), bucket=False).train(steps=2)


@ranks(slow(2), limit_s=200)
def test_overlap_with_a_backend() -> None:
    pair = TracedPair(TWO_BLOCKS, backend="aot_eager", overlap=True)
    pair.train(steps=2)
    with pytest.raises(fsdp2.ConfigError, match="'inductor' or 'aot_eager' with overlap=True"):
        fsdp2.compile(pair.model, backend="eager", overlap=True)


@products(name=["stack", "scalars"], options=[{}, {"overlap": True}, {"bucket": False}])
@ranks(slow(2), limit_s=500)
def test_inductor(name: str, options: dict[str, Any]) -> None:
    """Without options is as with overlap; `test_traced_models.py` has that, too."""
    pair = TracedPair(shorter(name, 2), backend="inductor", **options)
    pair.first_rtol = pair.later_rtol = 5e-4
    pair.train(steps=5)


BACKEND_CASES = ["stack", "tied_lm", "mixed_dtypes", "kwargs", "one_group"]


@products(name=BACKEND_CASES, backend=["eager", "aot_eager"])
@ranks(slow(2), slow(4), limit_s=300)
def test_five_steps_with_backends(name: str, backend: str) -> None:
    TracedPair(name, backend=backend).train(steps=5)


@products(name=list(CASES)[:12], choice=[True, False])
@ranks(slow(2), slow(4), limit_s=300)
def test_cases_with_each_way_to_reshard(name: str, choice: bool | int) -> None:
    TracedPair(shorter(name, 1), reshard_after_forward=choice).train(steps=2)


@ranks(slow(4), limit_s=500)
def test_cases_that_wait_on_neighbours() -> None:
    for case in (EVERY_KIND, shorter("mixed_dtypes", 1)):
        TracedPair(case, reshard_after_forward=2).train(steps=2)


@ranks(slow(4), limit_s=200)
def test_overlap_of_what_is_gathered_twice() -> None:
    """A unit that waits on neighbours: the second gather is of what the first one returned."""
    TracedPair(TWO_BLOCKS, backend="aot_eager", reshard_after_forward=2).train(steps=2)


# --- ranks that go different ways -----------------------------------------------------------------


class Branches(nn.Module):
    """Takes another block on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wide = nn.Linear(WIDTH, HIDDEN)
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[self.which](x) if self.which < 2 else self.wide(x)


@ranks(2, slow(3), slow(4), limit_s=100)
def test_ranks_that_compile_different_graphs_get_an_error_each(rank: int, world_size: int) -> None:
    """Not a hang, in a first step or later; then all may go on.

    One rank goes another way: on two axes those that share none with it learn it from others.
    """
    model = Branches()
    mesh = make_mesh(2, 2) if world_size == 4 else make_mesh()
    shard_each(*model.blocks, model.wide, model, mesh=mesh)
    compiled = fsdp2.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        model.which = 2 * (rank == 1)
        with pytest.raises(fsdp2.StateError, match="ranks compiled different graphs"):
            compiled(x)
        assert_sharded(model)
        model.which = 1
        compiled(x).sum().backward()
        torch.compiler.reset()
