"""``fsdp2.checkpoint``: state of a sharded model and its optimizer, in memory and in files.

Owns the list of the public functions. ``_state`` makes states and ``_load`` loads them,
``_optimizer_state`` has names and ids, ``_save``, ``_dcp`` and ``_safetensors``
write and read files.

Three forms, each ``{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}}``:

============ ============================================ =====================================
form         tensors                                      loads on
============ ============================================ =====================================
full         whole and plain                              any mesh, a plain model, torch's FSDP1
                                                          and FSDP2
sharded      DTensors; what ``save`` and ``load`` use any mesh, through a folder
rank-local   this rank's part, plain                      the same ranks of the same meshes
============ ============================================ =====================================

Every function is collective over the ranks of the model's meshes. Where one rank meets an error,
all of them raise it; a load that raises has changed nothing, and runs nothing that files say.
``docs/checkpoints.md`` has what can be relied on, and what is trusted.
"""

from fsdp2.checkpoint._background import SaveHandle
from fsdp2.checkpoint._change import IncompatibleKeys
from fsdp2.checkpoint._dcp import load
from fsdp2.checkpoint._latest import load_latest
from fsdp2.checkpoint._load import load_full_state, load_local_state, load_sharded_state
from fsdp2.checkpoint._neighbours import NeighbourCopies
from fsdp2.checkpoint._optimizer_state import rekey
from fsdp2.checkpoint._safetensors import load_safetensors, save_safetensors
from fsdp2.checkpoint._save import save
from fsdp2.checkpoint._state import full_state, local_state, sharded_state

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
