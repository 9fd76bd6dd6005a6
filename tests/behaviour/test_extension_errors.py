"""Promise: what an all-gather extension may not do is an error, the same one on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from tests.kit.extensions import (
    RELEASE,
    WIDTH,
    Bare,
    Dense,
    Half,
    Int8Weight,
    Opaque,
    apart,
    make,
    make_weight,
    refused,
    set_methods,
    shard,
    step,
)
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks


@ranks(2)
def test_tensors_that_stand_in_for_extended_parameters() -> None:
    """In functional_call a whole tensor may stand in; a DTensor is refused by name."""
    model, reference = shard(make((13,))), make((13,))
    x = torch.randn(4, WIDTH)
    whole = {"0.up": torch.randn(13, WIDTH)}
    found = torch.func.functional_call(model, whole, (x,))
    torch.testing.assert_close(found, torch.func.functional_call(reference, whole, (x,)))
    with refused(fsdp2.UnsupportedError, "up", "extension"):
        torch.func.functional_call(model, {"0.up": model[0].up.detach()}, (x,))


@ranks(2)
def test_what_is_refused_when_sharding() -> None:
    """A class with one of the two methods, or that cannot be split, or another dim: by name."""
    for kind, word in ((Half, "fsdp_post_all_gather"), (Opaque, "no shard can be made")):
        with refused(fsdp2.ConfigError, "up", word):
            fsdp2.fully_shard(make(kind=kind)[0], mesh=make_mesh())
    for kind in (Int8Weight, Bare):
        model = make(kind=kind)
        with refused(fsdp2.ConfigError, "up", "dim 0"):
            fsdp2.fully_shard(
                model[0], mesh=make_mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1)
            )
        assert type(model[0]) is Dense
        assert isinstance(model[0].up, kind)


@ranks(2)
def test_what_is_refused_about_memory_of_gathered_tensors() -> None:
    """An answer that is no bool, the method alone, and a True that is not true: by name."""
    alone = type("Alone", (torch.Tensor,), {RELEASE: lambda self: True})
    bare = type("AloneAndBare", (Bare,), {RELEASE: lambda self: True})
    model = make((13,), kind=None)
    model[0].up = nn.Parameter(model[0].up.data.as_subclass(alone))
    for refused_model, words in (
        (model, ("fsdp_pre_all_gather", "fsdp_post_all_gather")),
        (make((13,), kind=bare), ("fsdp_pre_all_gather", "fsdp_post_all_gather")),
        (make((13,), kind=apart(1)), ("returned 1", "int")),
    ):
        with refused(fsdp2.ConfigError, "up", RELEASE, *words):
            fsdp2.fully_shard(refused_model[0], mesh=make_mesh())
        assert type(refused_model[0]) is Dense
        assert not isinstance(refused_model[0].up, DTensor)
    aliases = type("Aliases", (Int8Weight,), {RELEASE: lambda self: True})
    model = shard(make((13,), kind=aliases))
    for _ in range(2):
        with refused(fsdp2.StateError, "up", RELEASE, "shares memory"):
            model(torch.randn(4, WIDTH))
        assert isinstance(model[0].up, DTensor)


@ranks(2)
def test_methods_set_later_are_asked_about_memory_too(rank: int) -> None:
    """At the first gather; what one rank answers wrongly is raised on all."""
    for answers in ((True, True), (True, "yes")):
        model = shard(make((13,), kind=None))
        set_methods(model[0].up)
        seen = []
        setattr(model[0].up._local_tensor, RELEASE, lambda found=answers[rank]: found)
        post = model[0].up._local_tensor.fsdp_post_all_gather

        def keep(
            outputs: Any, *args: Any, seen: Any = seen, post: Any = post, **kwargs: Any
        ) -> Any:
            seen += outputs
            return post(outputs, *args, **kwargs)

        model[0].up._local_tensor.fsdp_post_all_gather = keep
        if answers[1] is True:
            for _ in range(2):
                model[0].unshard()
                assert [tensor.untyped_storage().nbytes() for tensor in seen] == [0] * len(seen)
                torch.testing.assert_close(
                    model[0].up, make((13,), kind=None)[0].up.bfloat16().float()
                )
                model[0].reshard()
            assert seen
        else:
            with refused(fsdp2.StateError, "up", "rank 1" if rank == 0 else RELEASE):
                model[0].unshard()


@ranks(4)
def test_an_int_for_reshard_after_forward() -> None:
    """An extended parameter cannot wait on a smaller mesh, and the error names it."""
    model = make()
    with refused(fsdp2.ConfigError, "up", "reshard_after_forward"):
        fsdp2.fully_shard(model[0], mesh=make_mesh(), reshard_after_forward=2)
    assert type(model[0]) is Dense
    plain = fsdp2.fully_shard(make(kind=None)[0], mesh=make_mesh(), reshard_after_forward=2)
    set_methods(plain.up)
    with refused(fsdp2.ConfigError, "up", "reshard_after_forward"):
        plain(torch.randn(2, WIDTH))


@pytest.mark.parametrize("what", ["raises", "shape", "count", "result", "subclass"])
@ranks(2, 3)
def test_an_extension_that_fails_on_one_rank_at_first(what: str, rank: int) -> None:
    """An error that only one rank can see is raised on all, by name; then the model works."""
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather

    def bad(mesh: Any) -> Any:
        if what == "raises":
            raise KeyError("broken pre")
        found: dict[str, Any] = {
            "shape": ((torch.zeros(2, 3),), None),
            "count": ((torch.zeros(2), torch.zeros(2)), None),
            "result": torch.zeros(2),
            "subclass": ((make_weight(Int8Weight, 2, 2),), None),
        }
        return found[what]

    if rank == 0:
        local.fsdp_pre_all_gather = bad
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH))
    local.fsdp_pre_all_gather = good
    step(model)
    assert model[0].up.grad is not None


@pytest.mark.parametrize("beside", [False, True])
@ranks(2, 3)
def test_an_extension_that_fails_on_one_rank_later(
    rank: int, world_size: int, beside: bool
) -> None:
    """On a CPU an error of one rank in a later step is raised on all ranks too.

    So it is where another extended parameter of the unit does not fail.
    """
    model = shard(make((13,), kind=None))
    set_methods(model[0].up)
    if beside:
        set_methods(model[0].down)
    step(model)
    local: Any = model[0].up._local_tensor
    good = local.fsdp_pre_all_gather
    if rank == world_size - 1:
        local.fsdp_pre_all_gather = lambda mesh: ((torch.zeros(2, 3),), None)
    word = "other shapes" if rank == world_size - 1 else f"rank {world_size - 1}"
    with refused(fsdp2.StateError, "up", word):
        model(torch.randn(4, WIDTH))
    local.fsdp_pre_all_gather = good
    step(model)


@ranks(4)
def test_an_extension_that_fails_on_one_replica(rank: int) -> None:
    """An error in one replica is raised in the other one too, instead of a hang in backward."""
    model = shard(make((13,), kind=None), mesh=make_mesh(2, 2))
    set_methods(model[0].up)
    if rank == 3:
        model[0].up._local_tensor.fsdp_pre_all_gather = lambda mesh: 1 / 0
    with refused(fsdp2.StateError, "up", "fsdp_pre_all_gather"):
        model(torch.randn(4, WIDTH))


@ranks(2)
def test_what_post_may_not_return() -> None:
    """A post that returns no pair, or too little, is refused by name; shards stay registered."""
    whole = torch.zeros(13, WIDTH)
    for result in (whole, (whole, whole), (torch.zeros(2, 2), ())):
        model = shard(make((13,), kind=None))
        set_methods(model[0].up)
        model[0].up._local_tensor.fsdp_post_all_gather = lambda *args, found=result, **_: found
        with refused(fsdp2.StateError, "up", "fsdp_post_all_gather"):
            model(torch.randn(4, WIDTH))
        assert isinstance(model[0].up, DTensor)


@ranks(2)
def test_ranks_that_run_different_units(rank: int) -> None:
    """Ranks out of step get an error that says so, with extended parameters as without."""
    model = shard(make())
    for _ in range(2):
        step(model)
    with refused(fsdp2.StateError, "different collectives"):
        model[rank](torch.randn(4, WIDTH))
