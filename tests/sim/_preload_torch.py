"""What ranks that meet faults are born with: torch, and nothing that imports the package."""

import gc

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.distributed.tensor.parallel
import torch.nn.attention.flex_attention
import torch.testing

from tests.kit import rank  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()
