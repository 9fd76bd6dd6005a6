"""What every rank process has imported: they are forked from one process that imports this.

Torch imports part of itself at the first use, which is a second a rank otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import linecache
import os
import sys

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
import torch.testing

import fsdp2
from tests.kit.meshes import DEVICE
from tests.kit.rank import PRELOADED


def show_values_in_asserts() -> None:
    """Install pytest's rewriting of `assert`, so that a failure shows the values compared."""
    # A nicety, on private names of pytest: without it a bare assert still fails.
    with contextlib.suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config([])).mark_rewrite("tests")


show_values_in_asserts()
for name in dir(fsdp2):
    getattr(fsdp2, name)  # which loads it: else each rank would
for name in ("tests.kit.parity", *filter(None, os.environ.get(PRELOADED, "").split(","))):
    importlib.import_module(name)

COMPILING = {
    "tests.kit.compiled_pair",
    "tests.kit.traced",
    "tests.behaviour.test_compiled_optimizers",
    "tests.behaviour.test_composition",
}
WITH_INDUCTOR = {"tests.behaviour.test_compiled_buckets"}  # on ranks in the pool only

if DEVICE == "cpu" and COMPILING & set(sys.modules):
    # The first call of a compiler loads 600 modules and builds its tables: two seconds a rank.
    # Autograd starts threads in a build with CUDA, and a process that has them cannot be forked.
    # And it counts devices once: the simulated one is known to some ranks, and not yet here.
    may_train = torch.version.cuda is None and "tests.sim" not in sys.modules

    def warm(*, backend: str) -> None:
        compiled = torch.compile(torch.nn.Linear(2, 2), backend=backend)
        with torch.set_grad_enabled(may_train):
            loss = compiled(torch.ones(2, 2)).sum()
        if may_train:
            loss.backward()
        torch._dynamo.reset()

    warm(backend="aot_eager")
    if may_train and WITH_INDUCTOR & set(sys.modules):
        # Inductor loads 250 more modules, asks g++ what vectors there are and reads all headers of
        # a kernel: seconds in each rank that is the first to use it there. What a process knows of
        # this its forks know too. Bodies that need it say if there is no g++.
        import torch._inductor.config

        with contextlib.suppress(Exception), torch._inductor.config.patch(compile_threads=1):
            warm(backend="inductor")  # without the threads that start compilers, as it is forked
        torch._dynamo.reset()

# DTensor plans each op on fake tensors. Their mode notes where it was made, and the standard
# library then looks at every file on the stack for a change: a thirtieth of all that ranks do.
linecache.checkcache = lambda filename=None: None

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # what is never freed is never looked at, and its pages stay shared
