"""``fsdp2.checkpoint``: state of a sharded model and its optimizer, in memory and in files.

A state has one of three forms, each a dict
``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``:

============ ============================================ =====================================
form         tensors                                      loads on
============ ============================================ =====================================
full         unsharded and plain                          any mesh, a plain model, torch's FSDP1
                                                          and FSDP2
sharded      DTensors that share the model's memory       any mesh, with ``save`` and ``load``
rank-local   this rank's shards, as plain tensors         the same ranks of the same meshes
============ ============================================ =====================================

Every function is collective over the ranks of the model's meshes. If one rank fails, all ranks
raise. A load that raises changes nothing. A load executes no code from files unless you pass
``trust=True``: see ``docs/checkpoints.md``.
"""

import sys as _sys

from fsdp2.checkpoint import _load
from fsdp2.checkpoint._dcp import load, load_latest
from fsdp2.checkpoint._load import (
    IncompatibleKeys,
    load_full_state,
    load_local_state,
    load_sharded_state,
)
from fsdp2.checkpoint._neighbours import NeighbourCopies
from fsdp2.checkpoint._safetensors import load_safetensors, save_safetensors
from fsdp2.checkpoint._save import SaveHandle, save
from fsdp2.checkpoint._state import full_state, local_state, rekey, sharded_state

_sys.modules["fsdp2.checkpoint._change"] = _load  # the module of IncompatibleKeys in old pickles

__all__ = [
    "IncompatibleKeys",
    "NeighbourCopies",
    "SaveHandle",
    "full_state",
    "load",
    "load_full_state",
    "load_latest",
    "load_local_state",
    "load_safetensors",
    "load_sharded_state",
    "local_state",
    "rekey",
    "save",
    "save_safetensors",
    "sharded_state",
]
