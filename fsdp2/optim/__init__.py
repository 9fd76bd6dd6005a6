"""``fsdp2.optim``: optimizers for local shards or full matrices, and averages of shards."""

from fsdp2.optim._ema import EMA
from fsdp2.optim._local import local
from fsdp2.optim._offload import offload_states
from fsdp2.optim._owners import Owners, from_owners, plan_owners, to_owners
from fsdp2.optim._whole import whole

__all__ = [
    "EMA",
    "Owners",
    "from_owners",
    "local",
    "offload_states",
    "plan_owners",
    "to_owners",
    "whole",
]
