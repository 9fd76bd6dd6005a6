"""Hypothesis strategies of programs: what is drawn is right, or has one documented outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz._draw_models import Choices, Pinned, calls, models, mostly, setups
from tests.fuzz._program import (
    Backward,
    Clip,
    Compiled,
    Copy,
    Diverge,
    Evaluate,
    Fail,
    Forward,
    Freeze,
    Functional,
    Hook,
    Model,
    NewOptimizer,
    Op,
    Program,
    Replace,
    Reshard,
    Set,
    Setup,
    State,
    Unshard,
    Update,
    Whole,
    Write,
    Zero,
)

SETTINGS: dict[str, Sequence[Any]] = {
    "reshard_after_forward": (True, False),
    "reshard_after_backward": (True, False),
    "set_memory": ("balanced", "low", "fast"),
    "set_copy_free_min_bytes": (None, 1, 100),
    "set_reduce_scatter_max_input_buffers": (1, 2, 3),
    "set_force_sum_reduction_for_comms": (True, False),
    "reduction": ("mean", "sum", 2.0, 3.0),
    "unused": (True,),
    "prefetch": (1, 2, 0),
    "set_separate_reduce_scatter_group": (True, False),
    "set_is_last_backward": (True,),
}


@st.composite
def backwards(draw: st.DrawFn, choices: Choices, sync: str | None = None) -> Backward:
    many = draw(mostly(1, 2, 3, weight=4))
    how = draw(mostly("sum", "each", "reversed", "retain", "penalty", weight=2))
    if choices.recomputed and how in ("retain", "penalty"):
        how = "each"
    if choices.setup.tensor > 1 and how == "penalty":  # DTensor's gradients have no graph
        how = "sum"
    if choices.setup.precision == "half" and how == "penalty":  # of roundings: far off, and right
        how = "sum"
    usual = "yes" if sync is None else sync
    between: list[Op] = []
    if draw(mostly(False, True, weight=4)):
        between = draw(st.lists(st.one_of(*while_running(choices)), min_size=1, max_size=2))
    is_one = many == 1 and not between  # what it saves, nobody else writes to
    is_penalty = how == "penalty"  # on ranks whose graphs differ an error, see docs/differences.md
    drawn = calls(
        choices, alike=is_penalty, solves=not is_penalty, writes=is_one, empties=not is_penalty
    )
    return Backward(
        calls=tuple(draw(drawn) for _ in range(many)),
        how=how,
        sync=usual,
        between=tuple(between),
    )


def while_running(choices: Choices) -> list[st.SearchStrategy[Any]]:
    """Return what may be done between a forward and its backward."""
    layers = st.integers(-1, len(choices.layers) - 1)
    found: list[st.SearchStrategy[Any]] = [
        st.builds(Evaluate, st.sampled_from(["no_grad", "inference"]), calls(choices, alike=True)),
        st.builds(Unshard, layers, st.booleans()),
        st.builds(Reshard, layers),
        st.just(Zero()),
    ]
    found.append(st.just(NewOptimizer()))
    return found


@st.composite
def steps(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    """Draw a step: perhaps a few backwards without sync, one with, an update."""
    syncs = ["no", "shard"] if choices.setup.replicas else ["no"]
    ops: list[Op] = []
    for _ in range(draw(mostly(0, 1, 2, weight=5))):
        ops.append(draw(backwards(choices, draw(st.sampled_from(syncs)))))
    ops.append(draw(backwards(choices)))
    if draw(mostly(False, True, weight=5)):
        ops.append(Clip(draw(st.sampled_from([0.1, 1.0, 1e6]))))
    if draw(mostly(False, True, weight=3)):  # which may leave units whole
        mode = draw(st.sampled_from(["no_grad", "inference"]))
        ops.append(Evaluate(mode, draw(calls(choices, alike=True))))
    ops.append(Update(draw(mostly("none", "zeros", "model", "keep", weight=4))))
    return tuple(ops)


@st.composite
def failures(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    layer = draw(st.integers(0, len(choices.layers) - 1))
    phases = ["before", "after", "backward"] + ["recompute"] * (layer in choices.recomputed)
    thens = ["optimizer", "model", "reset", "new"]
    phase = draw(st.sampled_from(phases))
    return (Fail(layer, phase, draw(st.sampled_from(thens))),)


@st.composite
def single_ops(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    setup, params = choices.setup, st.integers(0, 11)
    # Hooks here, and those of torch's tensor parallelism, are functions inside of functions.
    unpicklable = setup.tensor > 1 or any(block.hook != "no" for block in choices.layers)
    kinds: list[st.SearchStrategy[Any]] = [
        st.builds(Evaluate, st.sampled_from(["no_grad", "inference"]), calls(choices, alike=True)),
        st.builds(Freeze, params, st.booleans()),
        st.builds(State, st.sampled_from(["torch", "assign", "full", "each", "sharded", "local"])),
        st.builds(Whole, st.sampled_from(["summon", "full_params"]), st.booleans()),
        st.just(NewOptimizer()),
        st.builds(Replace, params, st.sampled_from(["copy", "local", "new"])),
        st.just(Zero()),
        st.builds(Hook, params),
        st.builds(Copy, st.sampled_from(["deepcopy"] if unpicklable else ["deepcopy", "pickle"])),
        settings_of(choices),
        settings_of(choices),
        writes(choices),
    ]
    hides = choices.model.hides != "no"
    if not hides:
        kinds.append(st.builds(Compiled))
    if setup.precision == "same" and not hides:
        kinds.append(st.builds(Functional, st.sampled_from(["half", "own"])))
    if not (choices.recomputed or unpicklable or setup.precision != "same" or hides):
        kinds.append(st.just(Functional("grad")))
    op = draw(st.one_of(*kinds))
    return (op,)


@st.composite
def whole_ops(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    """Draw units that are made whole by hand, and given back (or not: the next step does it)."""
    layers = st.integers(-1, len(choices.layers) - 1)
    ops: list[Op] = [Unshard(draw(layers), draw(st.booleans()))]
    if draw(st.booleans()):
        ops.append(NewOptimizer())
    if draw(st.booleans()):
        ops.append(Reshard(-1))
    return tuple(ops)


@st.composite
def forgotten(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    """Draw a forward without a backward, and writes to what it may have left whole."""
    ops: list[Op] = []
    if draw(mostly(True, False)):
        ops.append(Forward(draw(calls(choices))))
    ops.append(draw(writes(choices)))
    if draw(st.booleans()):
        ops.append(Evaluate("no_grad", draw(calls(choices, alike=True))))
    return tuple(ops)


def writes(choices: Choices) -> st.SearchStrategy[Write]:
    hows = ["data", "local", "numpy"]
    if choices.setup.tensor == 1:  # torch's lists are of one mesh
        hows += ["foreach", "ema"]
    return st.builds(Write, st.sampled_from(hows))


@st.composite
def apart(draw: st.DrawFn, choices: Choices) -> tuple[Op, ...]:
    """Draw backwards through one of several roots, with and without sync."""
    ops: list[Op] = []
    for _ in range(draw(st.integers(1, 3))):
        sync = draw(st.sampled_from(["no", "yes"]))
        root = draw(st.sampled_from([0, 1, -1]))
        ops.append(replace(draw(backwards(choices, sync)), root=root, between=()))
        if draw(mostly(False, True)):
            ops.append(Update())
    return (*ops, draw(backwards(choices)), Update())


@st.composite
def settings_of(draw: st.DrawFn, choices: Choices) -> Set:
    names = [*SETTINGS, "reduction", "reduction"]  # of those that are about numbers, more
    name = draw(st.sampled_from(names))
    layer = draw(st.integers(-1, len(choices.layers) - 1))
    return Set(name, draw(st.sampled_from(list(SETTINGS[name]))), layer)


@st.composite
def programs(draw: st.DrawFn, ranks: int, pinned: Pinned = ()) -> Program:
    """Draw a program for this many ranks; `pinned` are fields of the setup that are not drawn."""
    setup = draw(setups(ranks, pinned))
    model = draw(models(setup))
    choices = Choices(model, setup)
    parts = [steps(choices), steps(choices), steps(choices), single_ops(choices)]
    parts += [single_ops(choices), single_ops(choices), failures(choices), whole_ops(choices)]
    parts += [forgotten(choices)]
    parts += [apart(choices)] * (3 * (model.roots == 2))
    drawn = draw(st.lists(st.one_of(*parts), min_size=1, max_size=6))
    ops = [op for part in drawn for op in part]
    if not isinstance(ops[-1], Update):
        ops += draw(steps(choices))
    if _may_diverge(setup, model) and draw(mostly(False, True, weight=15)):
        ops.append(
            Diverge(
                draw(st.integers(0, setup.data_ranks - 1)),
                draw(st.integers(0, len(choices.layers) - 1)),
                draw(st.sampled_from(["skip", "fail", "detach"])),
            )
        )
    return Program(ops=tuple(ops), model=model, setup=setup, seed=draw(st.integers(0, 3)))


def _may_diverge(setup: Setup, model: Model) -> bool:
    # Over two process groups ranks that diverge may wait for each other until the timeout.
    is_int = setup.reshard is not None and not isinstance(setup.reshard, bool)
    hides = model.hides != "no" or any(block.hides != "no" for block in model.layers())
    is_one = model.roots == 1 and not hides
    return setup.tensor == 1 and setup.data_ranks > 1 and not is_int and is_one
