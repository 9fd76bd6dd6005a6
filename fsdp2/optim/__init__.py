"""``fsdp2.optim``: optimizers that step on local shards, and averages of shards."""

from fsdp2.optim._ema import EMA
from fsdp2.optim._local import local

__all__ = ["EMA", "local"]
