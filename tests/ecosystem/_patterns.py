"""How public programs call FSDP2, as small programs of our own: the calls, their order and what
they read. The libraries need not be installed, and none of their code is here.

A pattern is a function of a library (torch's own FSDP2, or ours under the same names). It returns
what it computed, so that a test can put the two results beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from tests.kit.meshes import shared_mesh

VOCABULARY, WIDTH, LENGTH, HEADS = 32, 16, 6, 4
Result = dict[str, Any]


# --- a model --------------------------------------------------------------------------------------


class Norm(nn.Module):
    """By the root of the mean square, as models of transformers write it: in fp32, scaled after.

    `nn.RMSNorm` computes its weight's gradient in fp32, whatever the weight is in. Torch's own
    units round it to bf16 before they reduce it in fp32 (torch 2.13); ours do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = partial(torch.unflatten, dim=-1, sizes=(-1, WIDTH // HEADS))
        heads = [split(f(x)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.first_norm, self.second_norm = Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Decoder(nn.Module):
    """A language model with a buffer that no state dict has, as rotary embeddings are."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("positions", torch.empty(LENGTH, WIDTH), persistent=False)
        self.make_positions()

    def make_positions(self) -> None:
        """Compute the buffer, as programs do again after a model was on the meta device."""
        angles = torch.arange(LENGTH).unsqueeze(1) / torch.arange(1, WIDTH + 1)
        with torch.no_grad():
            self.positions.copy_(angles.sin())

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def build(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return Decoder()


def ids_of(step: int, rank: int | None = None) -> Tensor:
    """Return this rank's tokens of a step; ranks of a tensor-parallel group pass one number."""
    rank = dist.get_rank() if rank is None else rank
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=source)


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# --- the patterns ---------------------------------------------------------------------------------


def verl(library: ModuleType) -> Result:
    """Units by class names, a state that rank 0 broadcasts, a norm that is a DTensor.

    And between two phases all of it goes to the CPU, while a rollout has the weights.
    """
    full = build().state_dict() if dist.get_rank() == 0 else {}
    model = build(seed=4 + dist.get_rank())
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    keywords: Result = {
        "mesh": shared_mesh((dist.get_world_size(),), ("fsdp",)),
        "mp_policy": policy,
        "offload_policy": None,
        "reshard_after_forward": True,
    }
    names = {"DecoderLayer"}
    is_tied = model.head.weight is model.embedding.weight
    units = [
        module
        for module in model.modules()
        if type(module).__name__ in names or (isinstance(module, nn.Embedding) and not is_tied)
    ]
    for module in units:
        library.fully_shard(module, **keywords)
    library.fully_shard(model, **keywords)
    for module, following in pairwise(units):
        module.set_modules_to_forward_prefetch([following])
    options = StateDictOptions(full_state_dict=True, cpu_offload=False, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    optimizer = adamw(model)
    losses, norms, rollouts = [], [], []
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, ids_of(2 * step + micro)) / 2
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = get_total_norm(grads, 2.0, False, None)
        assert isinstance(norm, DTensor)
        norm = norm.full_tensor()
        clip_grads_with_norm_(list(model.parameters()), 0.5, norm, None)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm)
        model.cpu()
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to("cpu") if isinstance(value, Tensor) else value
        model.to("cpu")  # the device of this test
        rollouts.append({name: whole(p).bfloat16() for name, p in model.state_dict().items()})
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "losses": losses,
        "norms": norms,
        "rollouts": rollouts,
        "saved": get_model_state_dict(model, options=options),
        "isinstance": [isinstance(m, library.FSDPModule) for m in model.modules()],
    }


def llama_factory(library: ModuleType) -> Result:
    """As through accelerate's plugin: a model of rank 0 goes through the meta device.

    The optimizer was made before, and gets the sharded parameters by their names.
    """
    model = build(seed=3 if dist.get_rank() == 0 else 9)
    optimizer = adamw(model)
    names = {param: name for name, param in model.named_parameters()}
    full = model.state_dict()
    positions = model.positions
    model.to("meta")
    shard = partial(
        library.fully_shard,
        mesh=shared_mesh((dist.get_world_size(),), ("fsdp",)),
        mp_policy=library.MixedPrecisionPolicy(),
        offload_policy=None,
        reshard_after_forward=True,
    )
    for module in model.modules():
        if isinstance(module, DecoderLayer) and not isinstance(module, library.FSDPModule):
            shard(module)
    shard(model)
    sharded = {}
    for name, param in model.state_dict().items():
        tensor = full[name].detach().clone()
        dist.broadcast(tensor, src=0)
        sharded[name] = distribute_tensor(tensor, param.device_mesh, param.placements)
    model.load_state_dict(sharded, assign=True)
    model.positions = positions
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [now[names[param]] for param in group["params"]]
    optimizer.state.clear()
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(model, ids_of(step))
        loss.backward()
        norms.append(whole(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "losses": losses,
        "norms": norms,
        "state": state_of(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def torchtune(library: ModuleType) -> Result:
    """Conditions choose units from the inside out; values arrive on meta, tensor by tensor.

    Gradients are scaled by the tokens of all ranks, and states are gathered one by one.
    """
    full = build().state_dict()
    with torch.device("meta"):
        model: Any = Decoder()
    conditions: list[Callable[[str, nn.Module], bool]] = [
        lambda name, module: isinstance(module, DecoderLayer),
        lambda name, module: name in ("embedding", "head"),
    ]
    chosen = 0
    for name, module in reversed(list(model.named_modules())):
        if any(condition(name, module) for condition in conditions):
            library.fully_shard(module, reshard_after_forward=True)
            chosen += 1
    library.fully_shard(model, reshard_after_forward=True)
    values = {}
    for name, param in model.state_dict().items():
        part = distribute_tensor(full[name], param.device_mesh, param.placements)
        values[name] = nn.Parameter(part)
    missing = model.load_state_dict(values, strict=True, assign=True)
    model.positions = torch.empty(LENGTH, WIDTH)
    model.make_positions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(3):
        tokens = torch.tensor(float(LENGTH - 1 + dist.get_rank()))
        loss = loss_of(model, ids_of(step)) * tokens
        loss.backward()
        dist.all_reduce(tokens)
        for param in model.parameters():
            param.grad *= dist.get_world_size() / tokens
        clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach() / tokens)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    return {
        "units": chosen,
        "missing": list(missing.missing_keys),
        "losses": losses,
        "state": {name: whole(param).cpu() for name, param in model.state_dict().items()},
        "optimizer": saved["state"],
    }


def olmo_core(library: ModuleType, strategy: str) -> Result:
    """Replicas of shards, wrapping strategies, prefetch lists, and an embedding of its own.

    Values are made on the shards, after the meta device. Only the last microbatch is the last.
    """
    with torch.device("meta"):
        model: Any = Decoder()
    half = dist.get_world_size() // 2
    mesh = shared_mesh((half, 2), ("dp_replicate", "dp_shard"))
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard = partial(library.fully_shard, mesh=mesh, mp_policy=policy)
    if strategy != "blocks":
        shard(model.embedding)
        model.embedding.set_unshard_in_backward(False)
    for layer in model.layers:
        if strategy == "fine_grained":
            shard(layer.attention)
            shard(layer.feed_forward)
        shard(layer, reshard_after_forward=strategy != "fine_grained")
    if strategy == "full":
        shard(model.head, reshard_after_forward=False)
    shard(model, reshard_after_forward=strategy == "fine_grained")
    for number, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers)[number + 1 : number + 3])
    model.to_empty(device="cpu")
    model.make_positions()
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.2, a=-0.6, b=0.6)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
    optimizer = adamw(model)
    first = state_of(model)
    losses, norms = [], []
    for step in range(2):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_all_reduce(micro == 1)
            loss = loss_of(model, ids_of(2 * step + micro)) / 2
            loss.backward()
            losses.append(loss.detach())
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        norms.append(norm)
    return {"first": first, "losses": losses, "norms": norms, "state": state_of(model)}


def automodel(library: ModuleType) -> Result:
    """Shards what the getters find no state of, twice over; a head computes as its policy says.

    The loss is computed in pieces over the head, whose gradients wait for the last piece.
    """
    model = build()
    mesh = shared_mesh((dist.get_world_size(),), ("dp",))
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    made = []
    for _ in range(2):  # a second pass, as of a wrapper around a wrapper
        for module in (*model.layers, model.head, model):
            if _get_module_fsdp_state(module) is None:
                library.fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=None)
                made.append(type(module).__name__)
    model._set_unshard_async_op(True)
    library.register_fsdp_forward_method(model, "hidden")
    optimizer = adamw(model)
    losses, read = [], []
    for step in range(2):
        ids = ids_of(step)
        hidden = model.hidden(ids)
        pieces = hidden.detach().requires_grad_()
        head = model.head
        state = head._get_fsdp_state()
        group = state._fsdp_param_group
        read = [state._mp_policy.param_dtype, group.mesh_info.mesh, len(group.fsdp_params)]
        head.set_requires_gradient_sync(False, recurse=False)
        head.set_reshard_after_backward(False, recurse=False)
        total = torch.zeros(())
        for first, last in ((0, 2), (2, 4), (4, LENGTH - 1)):
            is_end = last == LENGTH - 1
            head.set_requires_gradient_sync(is_end, recurse=False)
            head.set_reshard_after_backward(is_end, recurse=False)
            logits = head(pieces[:, first:last]).float()
            target = ids[:, first + 1 : last + 1]
            piece = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            piece.backward()
            total += piece.detach()
        hidden.backward(pieces.grad)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"made": made, "read": read, "losses": losses, "state": state_of(model)}


def xtuner(library: ModuleType, offload: bool) -> Result:
    """Every part is a unit; the last layer stays whole; checkpointed layers; clipping by meshes.

    Frozen parameters are left out, and a layer's weights are gathered in its turn to be saved.
    """
    model = build()
    model.norm.requires_grad_(False)
    mesh = shared_mesh((dist.get_world_size(),), ("fsdp",))
    shard = partial(
        library.fully_shard,
        mesh=mesh,
        mp_policy=library.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        offload_policy=library.CPUOffloadPolicy(pin_memory=False) if offload else None,
    )
    last = len(model.layers) - 1
    for number, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer) if number < last else layer
        model.layers[number] = shard(wrapped, reshard_after_forward=number < last)
    for module in (model.embedding, model.norm, model.head):
        shard(module, reshard_after_forward=True)
    shard(model, reshard_after_forward=False)
    for layer, following in pairwise(model.layers):
        layer.set_modules_to_forward_prefetch([following])
    model.embedding.set_modules_to_forward_prefetch([model.layers[0]])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(model, ids_of(step))
        loss.backward()
        by_mesh: dict[DeviceMesh, list[Tensor]] = {}
        for param in trained:
            assert isinstance(param.grad, DTensor)
            by_mesh.setdefault(param.grad.device_mesh, []).append(param.grad.to_local())
        square = torch.zeros(())
        for grads in by_mesh.values():
            square += sum(grad.float().square().sum() for grad in grads)
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for param in trained:
            param.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        norms.append(norm)
    saved: dict[str, Tensor] = {}
    for number, layer in enumerate(model.layers):
        saved |= {f"{number}.{name}": whole(p) for name, p in layer.state_dict().items()}
    return {"losses": losses, "norms": norms, "saved": saved, "state": state_of(model)}


def composer(library: ModuleType) -> Result:
    """A policy of FSDP1 says which modules become units; groups of an optimizer are filled anew.

    The optimizer was made before; its groups have options of their own.
    """
    model = build()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    names = {param: name for name, param in model.named_parameters()}
    keywords = {"mesh": shared_mesh((dist.get_world_size(),), ("fsdp",))}

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, FeedForward):
            return {**keywords, "reshard_after_forward": False}
        return isinstance(module, DecoderLayer)

    policy = CustomPolicy(choose)
    targets = policy._run_policy(model, set(), {**keywords, "reshard_after_forward": True})

    def walk(module: nn.Module) -> None:
        for child in module.children():
            walk(child)
            if child in targets:
                library.fully_shard(child, **targets[child])

    walk(model)
    library.fully_shard(model, **keywords, reshard_after_forward=True)
    now = dict(model.named_parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group({**group, "params": [now[names[p]] for p in group["params"]]})
    losses = []
    for step in range(3):
        loss = loss_of(model, ids_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"units": len(targets), "losses": losses, "state": state_of(model)}


@contextmanager
def written_back(model: nn.Module) -> Iterator[None]:
    """Register whole parameters, and afterwards new sharded ones with what was written to them."""
    sharded: dict[tuple[nn.Module, str], Any] = {
        (module, name): param
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
    }
    for (module, name), param in sharded.items():
        module.register_parameter(name, nn.Parameter(whole(param)))
    yield
    for (module, name), old in sharded.items():
        new = distribute_tensor(getattr(module, name).detach(), old.device_mesh, old.placements)
        module.register_parameter(name, nn.Parameter(new))


def composer_write_back(library: ModuleType | None) -> Result:
    """Parameters are doubled while they are whole, between two forwards; None is a plain model."""
    model = build()
    if library is not None:
        for layer in model.layers:
            library.fully_shard(layer)
        library.fully_shard(model)
    with torch.no_grad():
        before = model(ids_of(0))
        if library is None:
            for param in model.parameters():
                param.mul_(1.5)
        else:
            for module in model.modules():
                if isinstance(module, library.FSDPModule):
                    module.reshard()
            with written_back(model):
                for param in model.parameters():
                    param.mul_(1.5)
        return {"before": before, "after": model(ids_of(0))}


def lingua(library: ModuleType) -> Result:
    """Tensor-parallel layers first, then units by paths: what `fully_shard` returns is set."""
    model = build()
    mesh = shared_mesh((1, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    shard = partial(
        library.fully_shard,
        mesh=mesh["dp_replicate", "dp_shard"],
        mp_policy=library.MixedPrecisionPolicy(torch.float32, torch.float32),
    )
    for path, reshard in (("layers.0", True), ("layers.1", True), ("layers.2", False)):
        parent, _, name = path.rpartition(".")
        made = shard(model.get_submodule(path), reshard_after_forward=reshard)
        setattr(model.get_submodule(parent), name, made)
    model = shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(2):
        loss = loss_of(model, ids_of(step, rank=mesh.get_local_rank("dp_shard")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "state": state_of(model)}


class WholeMatrices(torch.optim.Optimizer):
    """Orthogonalizes the momentum of whole matrices: each rank takes one of as many as ranks.

    Shards travel by an all-to-all, and updates go back by another. Of a plain model each process
    does all matrices.
    """

    def __init__(self, params: list[nn.Parameter], mesh: DeviceMesh | None) -> None:
        super().__init__(params, {"lr": 0.02})
        self.group = None if mesh is None else mesh.get_group()
        self.ranks = 1 if mesh is None else mesh.size()

    @staticmethod
    def orthogonal(matrix: Tensor) -> Tensor:
        x = matrix / (matrix.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x

    def updates(self, momenta: list[Tensor]) -> list[Tensor]:
        if self.group is None:
            return [self.orthogonal(momentum) for momentum in momenta]
        missing = self.ranks - len(momenta)
        sent = [m.contiguous() for m in momenta] + [torch.zeros_like(momenta[0])] * missing
        parts = [torch.empty_like(sent[0]) for _ in sent]
        dist.all_to_all(parts, sent, group=self.group)
        mine = self.orthogonal(torch.cat(parts))
        back = [torch.empty_like(sent[0]) for _ in sent]
        dist.all_to_all(back, [t.contiguous() for t in mine.chunk(self.ranks)], group=self.group)
        return back[: len(momenta)]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        by_shape: dict[torch.Size, list[Any]] = {}
        for param in params:
            by_shape.setdefault(param.shape, []).append(param)
        for same in by_shape.values():
            for first in range(0, len(same), self.ranks):
                self._step(same[first : first + self.ranks])

    def _step(self, batch: list[Any]) -> None:
        momenta = []
        for param in batch:
            if isinstance(param, DTensor):
                cut = [
                    (dim, placement.dim)
                    for dim, placement in enumerate(param.placements)
                    if isinstance(placement, Shard) and param.device_mesh.size(dim) > 1
                ]
                assert [dim for _, dim in cut] == [0]
                assert param.device_mesh.get_group(cut[0][0]) is self.group
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            state["momentum"].mul_(0.9).add_(param.grad)
            local = state["momentum"]
            momenta.append(local.to_local() if isinstance(local, DTensor) else local)
        for param, update in zip(batch, self.updates(momenta), strict=True):
            local = param.to_local() if isinstance(param, DTensor) else param
            local.add_(update, alpha=-0.02)


def dion(library: ModuleType | None) -> Result:
    """An optimizer of whole matrices over shards; None trains a plain model on all tokens."""
    model = build()
    mesh = None
    if library is not None:
        mesh = shared_mesh((dist.get_world_size(),), ("fsdp",))
        for layer in model.layers:
            library.fully_shard(layer, mesh=mesh)
        library.fully_shard(model, mesh=mesh)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [WholeMatrices(matrices, mesh), torch.optim.AdamW(others, lr=1e-2)]
    for step in range(3):
        if library is not None:
            loss_of(model, ids_of(step)).backward()
        else:
            ranks = dist.get_world_size()
            sum(loss_of(model, ids_of(step, rank)) for rank in range(ranks)).div(ranks).backward()  # type: ignore[union-attr]  # a sum of tensors
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"state": state_of(model)}
