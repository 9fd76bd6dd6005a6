"""The one model that every benchmark runs, in the sizes they need, and how each library shards it.

Owns the shape of the model and the variants. Knows nothing of counting.

A block holds nine parameters, like a decoder block of today: two norms, q, k, v, o, and a gated
feed-forward of three matrices. The root holds an input projection and a head, so that every block
sees an input that requires grad and no block is special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

LIBRARIES = ("plain", "ddp", "fsdp1", "torch", "torch tuned", "fsdp2")
OURS = "fsdp2"
CODED = "fsdp2 fp8"  # ours, whose parameters travel in fp8: `low_bits` alone compares it
PRECISIONS = ("fp32", "bf16")
PRECISION_NAMES = {"fp32": "fp32", "bf16": "bf16 parameters, fp32 reduction"}
GROUPINGS = ("default", "split root")


@dataclass(frozen=True)
class Size:
    """Sizes of a model: numbers of elements, not bytes."""

    depth: int
    width: int = 16
    hidden: int = 16
    vocabulary: int = 16
    tokens: int = 4

    @property
    def block_numel(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width

    @property
    def root_numel(self) -> int:
        """The input projection and the head together."""
        return 2 * self.width * self.vocabulary

    @property
    def numel(self) -> int:
        return self.depth * self.block_numel + self.root_numel


MEDIUM = Size(depth=6, width=256, hidden=768, vocabulary=4096, tokens=8)
"""In fp32 six blocks of 3.4 MB, input projection and head of 4.2 MB each: 28.9 MB."""


class Block(nn.Module):
    """One attention head and a gated feed-forward: `[tokens, width]` in, the same out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        weights = torch.softmax(self.q(h) @ self.k(h).t(), dim=-1)
        x = x + self.o(weights @ self.v(h))
        h = self.feed_forward_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Stack(nn.Module):
    """`depth` blocks between an input projection, or an embedding, and a head."""

    def __init__(self, size: Size, *, embedding: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Linear(size.vocabulary, size.width, bias=False)
        if embedding:
            self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def applies(library: str, precision: str) -> bool:
    """Say whether a variant exists: DDP has no parameters of lower precision than it keeps."""
    return library != "ddp" or precision == "fp32"


def build(
    library: str,
    size: Size,
    mesh: DeviceMesh,
    *,
    bf16: bool,
    split_root: bool = False,
    blocks_per_group: int = 1,
    embedding: bool = False,
) -> nn.Module:
    """Build the model as one of `LIBRARIES` runs it, on the device of the mesh.

    `bf16` means bf16 parameters and fp32 reduction; the plain model is then simply in bf16.
    With `split_root` the input projection and the head are groups of their own. The choices of
    groups are not for `ddp`, and `fsdp1` knows the default only. With `embedding` the input
    projection is an `nn.Embedding`; what `make_input` returns has to be told too.
    """
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = Stack(size, embedding=embedding)
    if library == "plain":
        return model.to(torch.bfloat16) if bf16 else model
    if library == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group(), init_sync=False
        )
    if library == "fsdp1":
        return _wrap(model, mesh, bf16=bf16)
    units = _find_units(model, split_root, blocks_per_group)
    if library in (OURS, CODED):
        import fsdp2

        more = {"gather_dtype": torch.float8_e4m3fn} if library == CODED else {}
        return _shard(model, units, mesh, fsdp2, bf16=bf16, **more)
    from torch.distributed import fsdp

    _shard(model, units, mesh, fsdp, bf16=bf16)
    if library == "torch tuned":
        _tune(model, units)
    return model


def _find_units(model: Stack, split_root: bool, blocks_per_group: int) -> list[list[nn.Module]]:
    """Return the modules of each group below the root, in forward order."""
    blocks = list(model.blocks)
    starts = range(0, len(blocks), blocks_per_group)
    units = [blocks[start : start + blocks_per_group] for start in starts]
    return [[model.embed], *units, [model.head]] if split_root else units


def _shard(
    model: Stack,
    units: Sequence[list[nn.Module]],
    mesh: DeviceMesh,
    library: Any,
    *,
    bf16: bool,
    **more: Any,
) -> Stack:
    kwargs: dict[str, Any] = {"mesh": mesh}
    if bf16:
        more |= {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if more:
        kwargs["mp_policy"] = library.MixedPrecisionPolicy(**more)
    for unit in units:
        library.fully_shard(unit if len(unit) > 1 else unit[0], **kwargs)
    library.fully_shard(model, **kwargs)
    return model


def _tune(model: Stack, units: Sequence[list[nn.Module]]) -> None:
    """Give torch's FSDP2 prefetch lists one unit deep and async all-gathers (a private switch)."""
    firsts: list[Any] = [unit[0] for unit in units]
    for unit, following in pairwise(firsts):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    root: Any = model
    root._set_unshard_async_op(True)


def _wrap(model: Stack, mesh: DeviceMesh, *, bf16: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision if bf16 else None,
        device_id=torch.device(mesh.device_type),
        use_orig_params=True,
    )


def make_input(
    library: str, size: Size, *, bf16: bool, device: str = "cpu", embedding: bool = False
) -> torch.Tensor:
    """Return a batch; a sharded model casts its input itself."""
    if embedding:
        return torch.arange(size.tokens, device=device)
    dtype = torch.bfloat16 if bf16 and library == "plain" else torch.float32
    return torch.ones(size.tokens, size.vocabulary, dtype=dtype, device=device)


def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return one training step without its optimizer: zero_grad to None, forward, backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step


def prepare_step(
    library: str, size: Size, mesh: DeviceMesh, *, bf16: bool = False, **grouping: Any
) -> Callable[[], None]:
    """Build a variant and return its step."""
    model = build(library, size, mesh, bf16=bf16, **grouping)
    return make_step(model, make_input(library, size, bf16=bf16, device=mesh.device_type))
