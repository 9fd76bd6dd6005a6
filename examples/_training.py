"""One rank's part of the run: shard the model, train, evaluate, save, generate.

The model is sharded in `shard_transformer`; the rest is a training loop as for a single device.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer

import _interrupt
from _checkpoint import Manifest, place_of
from _data import Batch, Corpus, held_out_batch, train_batch
from _model import Transformer
from _options import Options
from _pages import Pages
from fsdp2 import (
    Compress,
    FSDPModule,
    MixedPrecisionPolicy,
    checkpoint,
    compile,  # noqa: A004  # as in torch
    fully_shard,
    optim,
    register_comm_hook,
    register_fsdp_forward_method,
)


@dataclass(frozen=True)
class Unit:
    """Sizes of the parameters of a unit, and of one rank's shards of them."""

    name: str
    parameters: int
    numel: int
    shard_nbytes: int
    whole_nbytes: int


def precision_of(dtype: str) -> MixedPrecisionPolicy:
    """Return the policy that computes in a dtype and reduces in fp32."""
    if dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        gather_dtype=torch.float8_e4m3fn if dtype == "fp8" else None,
    )


NARROW = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def shard_transformer(model: Transformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard each block, then the rest, in place; parameters stay fp32 for the optimizer."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "generate")


def list_units(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model in module order, with this rank's shard sizes."""
    owned: dict[str, list[DTensor]] = {}
    unit_names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        owner = max((unit for unit in unit_names if _is_inside(name, unit)), key=len)
        owned.setdefault(owner, []).append(parameter)
    return [
        Unit(
            name=unit or "(root)",
            parameters=len(owned[unit]),
            numel=sum(parameter.numel() for parameter in owned[unit]),
            shard_nbytes=sum(parameter.to_local().nbytes for parameter in owned[unit]),
            whole_nbytes=sum(
                parameter.numel() * parameter.element_size() for parameter in owned[unit]
            ),
        )
        for unit in unit_names
        if unit in owned
    ]


def _is_inside(parameter_name: str, unit_name: str) -> bool:
    return not unit_name or parameter_name.startswith(f"{unit_name}.")


def print_plan(model: nn.Module) -> None:
    print(f"{'unit':<16}{'tensors':>8}{'elements':>14}{'shard bytes':>16}{'full bytes':>16}")
    units = list_units(model)
    for unit in units:
        print(
            f"{unit.name:<16}{unit.parameters:>8}{unit.numel:>14,}"
            f"{unit.shard_nbytes:>16,}{unit.whole_nbytes:>16,}"
        )
    print(
        f"{'all':<16}{sum(unit.parameters for unit in units):>8}"
        f"{sum(unit.numel for unit in units):>14,}"
        f"{sum(unit.shard_nbytes for unit in units):>16,}"
        f"{sum(unit.whole_nbytes for unit in units):>16,}"
    )


def build_optimizer(model: Transformer, options: Options) -> Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if options.optimizer == "muon":  # for the matrices of blocks
        inner = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        for group in groups:
            group["params"] = [p for p in group["params"] if all(p is not one for one in inner)]
            group |= {"cls": AdamW, "betas": (0.9, 0.95), "lr": options.learning_rate}
        # scale updates like AdamW's, so that one learning rate suits both
        muon = {"params": inner, "adjust_lr_fn": "match_rms_adamw", "lr": options.learning_rate}
        groups.append({**muon, "weight_decay": options.weight_decay})
        optimizer: Optimizer = optim.whole(Muon, groups)
        return optimizer
    return AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate_at(step: int, options: Options) -> float:
    """Return the learning rate: a linear warm-up, then a linear decay towards zero."""
    rising = (step + 1) / (options.warmup_steps + 1)
    falling = (options.steps - step) / max(1, options.steps - options.warmup_steps)
    return options.learning_rate * min(1.0, rising, falling)


class Trainer:
    """The model, the optimizer and the current step, on one rank."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        rows = options.batch_size // self.world_size
        self.rows = range(self.rank * rows, (self.rank + 1) * rows)
        self.corpus = Corpus.open(options.corpus)
        axis_names = ("replicate", "shard")[-len(options.mesh) :]
        mesh = init_device_mesh(device.type, options.mesh, mesh_dim_names=axis_names)
        # Every rank initialises the same full weights, which are then sharded.
        torch.manual_seed(options.seed)
        self.model = Transformer(options.model).to(device)
        policy = precision_of(options.dtype)
        shard_transformer(self.model, mesh, policy)
        if options.gradients in NARROW:
            hook = Compress(NARROW[options.gradients], error_feedback=True)
            register_comm_hook(self.model, hook)
        self.pages = Pages(options, policy)
        # Training and evaluation run the compiled forward; everything else uses the model itself.
        self.forward: nn.Module = self.model
        if options.backend is not None:
            self.forward = compile(self.model, backend=options.backend, fullgraph=True)
        self.optimizer = build_optimizer(self.model, options)
        self.step = 0
        self.saved_step = -1
        self.saving: checkpoint.SaveHandle | None = None

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, or start at step 0 if there is none."""
        folder = self.options.checkpoint_dir
        extra = checkpoint.load_latest(folder, self.model, self.optimizer)
        if extra is not None:
            saved = Manifest.of_extra(extra)
            self.step = self.saved_step = saved.step
            path = place_of(folder, saved.step)
            self.say(f"resumed from {path}, {saved.bytes_seen:,} bytes into training")

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def train(self) -> bool:
        """Train up to `--stop-at`. Return False if ranks stopped early because one was asked to."""
        _interrupt.only_ask()
        options, start_step = self.options, self.step
        start_s = window_s = time.perf_counter()
        window_step = self.step
        step_tokens = options.batch_size * options.model.sequence_length
        is_interrupted = False
        with ExitStack() as recorded:
            while self.step < options.stop_at and not is_interrupted:
                if self.step == max(self.pages.first_step, start_step):
                    recorded.enter_context(self.pages.recording(self.model))
                loss, is_interrupted = self._train_step()
                self._record(loss)
                if self.step % options.log_every == 0 or self.step == options.stop_at:
                    now_s = time.perf_counter()
                    tokens = (self.step - window_step) * step_tokens
                    step_s = (now_s - start_s) / (self.step - start_step)
                    left_s = step_s * (options.stop_at - self.step)
                    self.say(
                        f"step {self.step:>6}/{options.steps}  loss {loss:.4f}  "
                        f"{tokens / (now_s - window_s):>9,.0f} tokens/s  "
                        f"peak {peak_nbytes(self.device) / 2**20:,.0f} MiB  left {left_s:.0f} s"
                    )
                    window_s, window_step = now_s, self.step
                if options.save_every and self.step % options.save_every == 0:
                    self.save()
        return not is_interrupted

    def _train_step(self) -> tuple[float, bool]:
        """Take one step; return the mean loss, and whether any rank was asked to stop."""
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, options)
        batch = train_batch(
            self.corpus,
            seed=options.seed,
            step=self.step,
            rows=self.rows,
            batch_size=options.batch_size,
            length=options.model.sequence_length,
        )
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

        # One all-reduce for the loss and the stop flags: all ranks stop after the same step.
        asked = torch.tensor(float(_interrupt.is_requested()), device=self.device)
        totals = torch.stack((loss.detach(), asked))
        dist.all_reduce(totals)
        loss_total, asked_total = totals.tolist()
        return loss_total / self.world_size, asked_total > 0

    def _loss(self, batch: Batch) -> Tensor:
        loss = self.forward(batch.tokens.to(self.device), batch.targets.to(self.device))
        assert isinstance(loss, Tensor)
        return loss

    def _record(self, loss: float) -> None:
        if self.options.metrics is not None and self.rank == 0:
            with self.options.metrics.open("a") as file:
                line = {"step": self.step, "loss": loss, "ranks": self.world_size}
                file.write(json.dumps(line) + "\n")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean held-out loss in nats per byte. The batches are the same on any mesh."""
        options = self.options
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for index in range(options.held_out_batches):
            batch = held_out_batch(
                self.corpus,
                index=index,
                batches=options.held_out_batches,
                rows=self.rows,
                batch_size=options.batch_size,
                length=options.model.sequence_length,
            )
            total += self._loss(batch)
        self.model.train()
        dist.all_reduce(total)
        loss = total.item() / (self.world_size * options.held_out_batches)
        self.say(f"held-out loss after step {self.step}: {loss:.4f} nats per byte")
        return loss

    def save(self) -> None:
        """Save a checkpoint in the background, while training continues."""
        if self.step == self.saved_step:
            return
        self.saving = checkpoint.save(
            place_of(self.options.checkpoint_dir, self.step),
            self.model,
            self.optimizer,
            extra=self.options.manifest(self.step).as_extra(),
            background=True,
            keep_last=self.options.keep_last,
        )
        self.saved_step = self.step

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is complete, or raise the error of its save."""
        if self.saving is not None:
            self.saving.wait()
            self.say(f"saved {self.saving.path}")

    def sample(self) -> None:
        """Print a sample. All ranks generate it, because each needs the shards of the others."""
        options = self.options
        if not options.sample_bytes:
            return
        prompt = torch.tensor([0, *options.prompt.encode()], device=self.device)
        generated = self.model.generate(
            prompt,
            options.sample_bytes,
            options.temperature,
            torch.Generator().manual_seed(options.seed),
        )
        text = bytes(generated[1:].tolist()).decode(errors="replace").replace("\0", "\n")
        self.say(f"--- sample ---\n{text}\n--- end of sample ---")


def peak_nbytes(device: torch.device) -> int:
    """Return this rank's peak memory: that of CUDA tensors, or that of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # `ru_maxrss` is in KiB, but in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def threads_for(ranks: int) -> int:
    """Return the number of threads of each rank, if `ranks` ranks share this machine's cores."""
    can_ask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1
    return max(1, cores // ranks)


def run_rank(options: Options) -> int:
    """Run one rank from start to end, and return its exit status."""
    device = torch.device(options.device_type)
    timeout = timedelta(seconds=options.timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        torch.set_num_threads(threads_for(int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo", timeout=timeout)
    torch.use_deterministic_algorithms(options.deterministic)

    trainer = Trainer(options, device)
    shape = " x ".join(map(str, options.mesh))
    trainer.say(f"{options.size} model, {options.ranks} ranks on {device.type}, mesh {shape}")
    if trainer.rank == 0:
        print_plan(trainer.model)
    if options.resume != "no":
        trainer.resume()
    trainer.evaluate()
    is_complete = trainer.train()
    trainer.save()
    if is_complete:
        trainer.evaluate()
        trainer.sample()
    trainer.wait_for_save()
    if is_complete:
        for page in trainer.pages.draw():
            trainer.say(f"drew {page}: open it in a browser")
    else:
        trainer.say(f"interrupted after step {trainer.step}; continue with --resume")
    dist.destroy_process_group()
    return 0 if is_complete else _interrupt.STATUS
