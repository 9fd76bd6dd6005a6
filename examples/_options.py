"""Command-line options, their defaults, and the checks that need no process group."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

import _interrupt
from _checkpoint import Manifest, read_manifest
from _data import CorpusFiles, build_cache, standard_library
from _model import ModelConfig


@dataclass(frozen=True)
class Preset:
    """A model size, with a suitable batch size and learning rate."""

    width: int
    layers: int
    heads: int
    sequence_length: int
    batch_size: int
    learning_rate: float
    steps: int


PRESETS = {
    "tiny": Preset(32, 2, 2, 32, 8, 1e-2, 50),
    "small": Preset(128, 4, 2, 128, 8, 4e-3, 800),
    "base": Preset(768, 12, 12, 1024, 32, 6e-4, 5000),
    "large": Preset(2048, 24, 16, 2048, 64, 3e-4, 20000),
}


@dataclass(frozen=True)
class Options:
    ranks: int
    mesh: tuple[int, ...]
    device_type: str
    dtype: str
    gradients: str
    backend: str | None
    timeout_s: float
    size: str
    model: ModelConfig
    steps: int
    stop_at: int
    batch_size: int
    learning_rate: float
    optimizer: str
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    seed: int
    resume: str
    checkpoint_dir: Path
    corpus: CorpusFiles
    save_every: int
    keep_last: int
    log_every: int
    held_out_batches: int
    sample_bytes: int
    temperature: float
    prompt: str
    metrics: Path | None
    recorded_steps: int
    pages_dir: Path
    deterministic: bool

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint of this run."""
        return Manifest(
            step=step,
            bytes_seen=step * self.batch_size * self.model.sequence_length,
            size=self.size,
            sequence_length=self.model.sequence_length,
            batch_size=self.batch_size,
            seed=self.seed,
            corpus_fingerprint=self.corpus.fingerprint,
            optimizer=self.optimizer,
        )


class _Parser(argparse.ArgumentParser):
    """Reports an error on one rank only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {message}\n(--help lists the options)", file=sys.stderr)
        sys.exit(2)


def _mesh(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.lower().split("x"))
    if len(sizes) > 2 or min(sizes) < 1:
        raise ValueError(text)
    return sizes


_mesh.__name__ = "mesh (SHARD or REPLICATExSHARD, for example 4 or 2x2)"


def _build_parser() -> _Parser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fsdp2-examples")
    parser = _Parser(
        prog="train_lm.py",
        description="Train a byte-level transformer, sharded with fsdp2, on Python source code.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    where = parser.add_argument_group("execution").add_argument
    where("--ranks", type=int, help="number of processes; default: one per GPU, or 2 on a CPU")
    where("--mesh", type=_mesh, help="4: shard over 4 ranks; 2x2: replicate over 2, shard over 2")
    where(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs if available",
    )
    where(
        "--dtype",
        choices=("fp32", "bf16", "fp8"),
        default="fp32",
        help="bf16: compute in bf16, reduce in fp32; fp8: the same, but gather parameters in fp8",
    )
    where(
        "--gradients",
        choices=("fp32", "bf16", "int8", "fp8"),
        default="fp32",
        help="dtype in which gradients are sent, with error feedback if it is not fp32",
    )
    where(
        "--compile",
        nargs="?",
        const="inductor",
        choices=("inductor", "aot_eager"),
        help="compile the whole model, collectives included",
    )
    where(
        "--timeout",
        type=float,
        default=300,
        help="timeout of collectives, in seconds",
    )
    where("--deterministic", action="store_true", help="use only deterministic CUDA kernels")
    what = parser.add_argument_group("training; some defaults depend on --size").add_argument
    what(
        "--size",
        choices=tuple(PRESETS),
        default="small",
        help="number of parameters: small 0.9 M, base 86 M, large 1.2 B",
    )
    what("--steps", type=int, help="length of the learning-rate schedule, in steps")
    what("--stop-at", type=int, help="save a checkpoint and exit after this step")
    what("--batch-size", type=int, help="sequences per step, over all ranks")
    what("--sequence-length", type=int, help="bytes per sequence")
    what("--lr", type=float, help="peak learning rate")
    what(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: Muon for the matrices of blocks, AdamW for the rest",
    )
    what("--warmup-steps", type=int, help="default: a twentieth of --steps")
    what("--weight-decay", type=float, default=0.1, help="weight decay of matrices")
    what("--clip-norm", type=float, default=1.0, help="maximum norm of all gradients")
    what("--seed", type=int, default=0, help="seed of weights, batches and the sample")
    files = parser.add_argument_group("files").add_argument
    files(
        "--corpus",
        type=Path,
        default=standard_library(),
        help="read the .py files below this folder",
    )
    files("--cache-dir", type=Path, default=cache, help="folder for the concatenated corpus")
    files("--checkpoint-dir", type=Path, default=Path("runs/train_lm"), help="checkpoint folder")
    files(
        "--resume",
        nargs="?",
        const="must",
        choices=("must", "auto", "no"),
        help="continue from the newest checkpoint in --checkpoint-dir; auto: if there is one; "
        "default: auto under torchrun, which may restart ranks, else no",
    )
    files(
        "--save-every", type=int, default=500, help="steps between checkpoints; 0: only at the end"
    )
    files("--keep-last", type=int, default=2, help="number of checkpoints to keep")
    files(
        "--metrics",
        type=Path,
        help="append one JSON line per step; for a repeated step, the last line is valid",
    )
    files(
        "--recorded-steps",
        type=int,
        default=8,
        help="number of last steps that the pages show; 0: write no pages",
    )
    files("--pages-dir", type=Path, help="default: --checkpoint-dir with the suffix -pages")
    add("--log-every", type=int, default=25, help="steps between progress lines")
    add("--held-out-batches", type=int, default=32, help="batches per evaluation")
    add("--sample-bytes", type=int, default=240, help="length of the generated sample")
    add("--temperature", type=float, default=0.7, help="sampling temperature")
    add("--prompt", default="def read_lines(path):\n", help="prompt of the sample")
    return parser


def parse_options(arguments: Sequence[str]) -> Options:
    """Return valid options, or exit with status 2 and one message on stderr."""
    parser = _build_parser()
    given = parser.parse_args(arguments)
    preset = PRESETS[given.size]
    for name in ("steps", "batch_size", "sequence_length"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(preset, name))
    _check_numbers(parser, given)
    if importlib.util.find_spec("numpy") is None:
        parser.error("checkpoints need numpy, which torch uses to send objects between ranks")

    device_type = given.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = _choose_ranks(parser, given, device_type)
    if given.batch_size % ranks:
        parser.error(
            f"--batch-size {given.batch_size} does not divide evenly over {ranks} ranks: "
            f"choose a multiple of {ranks}"
        )
    folder = given.checkpoint_dir
    options = Options(
        ranks=ranks,
        mesh=given.mesh or (ranks,),
        device_type=device_type,
        dtype=given.dtype,
        gradients=given.gradients,
        backend=given.compile,
        timeout_s=given.timeout,
        size=given.size,
        model=ModelConfig(preset.width, preset.layers, preset.heads, given.sequence_length),
        steps=given.steps,
        stop_at=min(given.stop_at or given.steps, given.steps),
        batch_size=given.batch_size,
        learning_rate=given.lr if given.lr is not None else preset.learning_rate,
        optimizer=given.optimizer,
        warmup_steps=given.warmup_steps if given.warmup_steps is not None else given.steps // 20,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm,
        seed=given.seed,
        resume=given.resume or ("auto" if _interrupt.is_rank() else "no"),
        checkpoint_dir=given.checkpoint_dir,
        corpus=_prepare_corpus(parser, given),
        save_every=given.save_every,
        keep_last=given.keep_last,
        log_every=given.log_every,
        held_out_batches=given.held_out_batches,
        sample_bytes=given.sample_bytes,
        temperature=given.temperature,
        prompt=given.prompt,
        metrics=given.metrics,
        recorded_steps=given.recorded_steps,
        pages_dir=given.pages_dir or folder.with_name(f"{folder.name}-pages"),
        deterministic=given.deterministic,
    )
    _check_files(parser, options)
    return options


def _check_numbers(parser: _Parser, given: argparse.Namespace) -> None:
    at_least = {"ranks": 1, "steps": 1, "stop_at": 1, "batch_size": 1, "sequence_length": 2}
    at_least |= {"warmup_steps": 0, "save_every": 0, "log_every": 1, "held_out_batches": 1}
    at_least |= {"keep_last": 1, "sample_bytes": 0, "seed": 0, "recorded_steps": 0}
    for name, smallest in at_least.items():
        value = getattr(given, name)
        if value is not None and value < smallest:
            parser.error(f"--{name.replace('_', '-')} must be at least {smallest}, found {value}")
    for name in ("lr", "clip_norm", "temperature", "timeout"):
        value = getattr(given, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be above 0, found {value}")
    if not 0 <= given.weight_decay < float("inf"):
        parser.error(f"--weight-decay must be 0 or more, found {given.weight_decay}")
    if given.seed >= 1 << 31:
        parser.error(f"--seed must be below 2**31, found {given.seed}")


def _choose_ranks(parser: _Parser, given: argparse.Namespace, device_type: str) -> int:
    """Return the number of ranks: from torchrun, else --ranks, --mesh or the machine."""
    if device_type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here; use --device cpu")
    gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    in_mesh = 1
    for size in given.mesh or ():
        in_mesh *= size
    launched = int(os.environ["WORLD_SIZE"]) if _interrupt.is_rank() else None
    ranks: int = launched or given.ranks or (in_mesh if given.mesh else gpus or 2)
    if given.ranks is not None and given.ranks != ranks:
        parser.error(f"--ranks {given.ranks}, but torchrun started {ranks}: omit --ranks")
    if given.mesh and in_mesh != ranks:
        shape = "x".join(map(str, given.mesh))
        parser.error(f"--mesh {shape} needs {in_mesh} ranks, found {ranks}: pass another mesh")
    if device_type == "cuda" and launched is None and ranks > gpus:
        parser.error(
            f"{ranks} ranks need {ranks} GPUs, found {gpus}: lower --ranks or use --device cpu"
        )
    return ranks


def _prepare_corpus(parser: _Parser, given: argparse.Namespace) -> CorpusFiles:
    if not given.corpus.is_dir():
        parser.error(f"--corpus {given.corpus} is not a folder")
    try:
        files = build_cache(given.corpus, given.cache_dir)
    except OSError as error:
        parser.error(f"cannot write the corpus to --cache-dir {given.cache_dir}: {error}")
    needed = given.sequence_length + 2
    for split, path in (("train on", files.train), ("hold out", files.held_out)):
        if path.stat().st_size < needed:
            parser.error(
                f"--corpus {given.corpus} has {path.stat().st_size} bytes of .py files to {split}, "
                f"but one sequence needs {needed}: pass a folder with more .py files"
            )
    return files


def _check_files(parser: _Parser, options: Options) -> None:
    folder = options.checkpoint_dir
    if options.resume != "no":
        _check_resumable(parser, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if options.metrics is not None:
            options.metrics.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot create a folder for the results: {error}")
    if not os.access(folder, os.W_OK | os.X_OK):
        parser.error(f"--checkpoint-dir {folder} is not writable")


def _check_resumable(parser: _Parser, options: Options) -> None:
    folder = options.checkpoint_dir
    try:
        saved = read_manifest(folder)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        parser.error(f"--resume: cannot read the checkpoint in {folder}: {error}")
    if saved is None:
        if options.resume == "auto":
            return
        parser.error(
            f"--resume: no checkpoint in {folder}; omit --resume, or pass another --checkpoint-dir"
        )
    for change in saved.differences(options.manifest(saved.step)):
        parser.error(
            f"--resume: the checkpoint in {folder} was saved with {change.name} {change.saved}, "
            f"but this run has {change.asked}: pass equal values, or another --checkpoint-dir"
        )
