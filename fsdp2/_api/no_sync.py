"""``no_sync``: backwards that accumulate instead of reducing, inside a context.

Owns when that may be entered and what is restored. It must not know how gradients accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from fsdp2._api.settings import refuse_during_step, sharded_units


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Let backwards inside the context add up gradients without communication.

    The next backward outside of it that goes through the same root reduces the sum. A unit with no
    unit above it is a root; a ``module`` that contains several has one such backward to wait for in
    each. An optimizer's step before that goes on without these gradients, and warns. What counts is
    where ``backward()`` is called, not the forward. Gradients add up on whole parameters, in the
    reduce dtype: on each rank they take the memory of the gradients of the whole model. Not so in a
    unit with ``shard="gradients"``: its backwards reduce over the shard axis all the same, and add
    up there; only the all-reduce over a replicate axis is left to the last. Inside the
    context, ``set_requires_gradient_sync`` of every unit in ``module`` is False. Afterwards it is
    what it was before. Contexts may be nested.

    Args:
        module: the model, or a part of it. It need not be sharded itself.

    Raises:
        ConfigError: there is no unit in ``module``.
        StateError: entered inside of a forward or a backward of ``module``. Nothing was changed.

    Source: the method of the same name of torch's ``FullyShardedDataParallel``.
    """
    units = sharded_units("no_sync", "module", module)
    refuse_during_step(
        "no_sync",
        units,
        "Some units may have reduced already: enter it before the forward, or between forward and "
        "backward.",
    )
    before = [(unit, unit.settings) for unit in units]
    for unit in units:
        unit.configure(**unit.settings.sharding.sync(False))
    try:
        yield
    finally:
        for unit, settings in before:
            unit.configure(
                reduce_grads=settings.reduce_grads, all_reduce_grads=settings.all_reduce_grads
            )
