"""Train a small language model, sharded with fsdp2, on the source of Python's standard library.

    python examples/train_lm.py                       # 2 ranks on a CPU, about two minutes
    python examples/train_lm.py --mesh 2x2            # replicate over 2, shard over 2
    python examples/train_lm.py --resume              # continue from the last checkpoint
    python examples/train_lm.py --compile             # one graph forward, one backward
    torchrun --nproc-per-node 8 examples/train_lm.py --size base --dtype bf16
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-endpoint first-machine:29500 --rdzv-id lm examples/train_lm.py   # on each machine

If run directly, this file checks its arguments and starts torchrun on itself. If run by torchrun,
it is a rank, and resumes from the newest checkpoint if there is one. Read `_training` (sharding and
the training loop) first. The other parts are `_model` (the transformer), `_data` (the corpus),
`_options` (the command line), `_checkpoint` (metadata of checkpoints) and `_interrupt` (Ctrl-C).
"""

from __future__ import annotations

import logging
import os
import sys

import _interrupt

# isort: split
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from _options import Options, parse_options
from _training import run_rank, threads_for

# A rank that receives a signal finishes its step and saves; torchrun's default limit is 30 s.
SHUTDOWN_LIMIT_S = 120


def quieten_torchrun() -> None:
    """Hide torchrun's warnings about Ctrl-C. Each of its modules has a separate log level."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic."):
            logging.getLogger(name).setLevel(logging.ERROR)


def launch(options: Options, arguments: list[str]) -> int:
    """Start torchrun on this file, wait for the ranks, and return the exit status for the shell."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(options.ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_LIMIT_S))
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    quieten_torchrun()
    torchrun = ["--standalone", "--nproc-per-node", str(options.ranks), os.path.abspath(__file__)]
    try:
        torch.distributed.run.main([*torchrun, *arguments, "--resume", options.resume])
    except SignalException as stopped:
        return 128 + stopped.sigval.value
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        print(f"train_lm.py: rank {rank} failed with status {failure.exitcode}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    if not _interrupt.is_rank():
        return launch(options, arguments)
    return run_rank(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
