"""What emitted code does, in order: collectives, waits, compute, copies, memory.

Owns the walk through one emitted module: it runs the body of ``call`` on tensors without data
(device ``meta``), and writes down what each statement does. It must not know where the code comes
from, nor what is made of the events.

[Note: how bytes are counted]
- ``issue``: the larger side of a collective: what an all-gather returns, what a reduce-scatter
  takes. ``wait`` names the collectives whose result is waited for. Waiting for a tensor waits for
  everything in flight on its memory, as torch's registry of works does.
- ``copy`` and ``cast``: bytes *written* by kernels and calls that only move data, or move it into
  another dtype. A kernel that also computes has an event for each kind of its stores.
- ``alloc`` and ``free``: memory, not names: a view keeps its memory, so does the frame that called
  a subgraph, and a collective in flight keeps what it reads and writes.
- ``unknown``: a call that is none of these: somebody has to look at it.
"""

from __future__ import annotations

import ast
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives  # what collectives return, without data
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tests.kit.emitted_kernels import Kernel
from tests.kit.emitted_module import Module, statements_of, unpacked

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_COPIES = ("copy_", "copy", "clone", "cat", "stack", "contiguous", "constant_pad_nd", "_to_copy")
_COPIES += ("slice_scatter", "index_copy", "split_with_sizes_copy", "_foreach_copy_", "to", "fill_")
_PRODUCTS = ("mm", "linear", "conv", "attention", "gemm", "einsum", "lstm")
_IGNORED = ("assert_", "run_intermediate_hooks", "args.clear", "torch.cuda.", "maybe_profile")


@dataclass(frozen=True)
class Event:
    """One thing that the code does."""

    kind: str
    name: str = ""
    nbytes: int = 0
    flops: int = 0
    dtype: str = ""
    ids: tuple[int, ...] = ()

    @property
    def is_product(self) -> bool:
        """True for a product of matrices: compute that something can hide behind."""
        return self.kind == "compute" and self.flops > 0

    def __str__(self) -> str:
        parts = [self.kind, self.name, f"{self.nbytes} B" if self.nbytes else "", self.dtype]
        parts += [f"{self.flops} flop" if self.flops else "", *(f"#{id_}" for id_ in self.ids)]
        return " ".join(part for part in parts if part)


class Memory:
    """An allocation. It ends when nobody has it any more."""

    def __init__(self, nbytes: int, ended: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.in_flight: list[int] = []
        weakref.finalize(self, ended).atexit = False


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor without data, and the memory that it would lie in."""

    tensor: Tensor
    memory: Memory

    def viewed(self, tensor: Tensor) -> Buffer:
        return Buffer(tensor, self.memory)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize


@dataclass
class _Frame:
    """Names of one function, while it runs."""

    names: dict[str, Any] = field(default_factory=dict)


class Walk:
    """Walks through modules, one after the other, and keeps the events of all.

    ``ids`` of collectives count on from module to module; buffers that one returns can be the next
    one's arguments.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._held: dict[int, list[Buffer]] = {}  # by collectives in flight
        self._issued = 0
        self._module = Module("")

    def allocate(self, tensor: Tensor, *, is_counted: bool = True) -> Buffer:
        """Make a buffer like a tensor; parameters and batches are not counted."""
        nbytes = tensor.untyped_storage().nbytes()
        if not is_counted:
            return Buffer(tensor, Memory(nbytes, lambda: None))
        self._add("alloc", nbytes=nbytes)
        return Buffer(tensor, Memory(nbytes, partial(self._add, "free", nbytes=nbytes)))

    def run(self, module: Module, arguments: list[Any]) -> list[Any]:
        """Walk through ``call``; it empties the list, as the code does."""
        self._module = module
        return self._function(module.functions["call"], arguments)

    def _add(self, kind: str, name: str = "", **what: Any) -> None:
        self.events.append(Event(kind, name, **what))

    def _function(self, function: ast.FunctionDef, arguments: list[Any]) -> list[Any]:
        frame = _Frame(dict(zip(unpacked(function), arguments, strict=True)))
        arguments.clear()
        for statement in statements_of(function.body):
            if isinstance(statement, ast.Return):
                return list(self._evaluate(statement.value, frame) or ())
            self._statement(statement, frame)
        return []

    def _statement(self, statement: ast.stmt, frame: _Frame) -> None:
        if isinstance(statement, ast.Assign):
            if ast.unparse(statement.value) == "args":
                return  # the unpacking of arguments
            value = self._evaluate(statement.value, frame)
            for target in statement.targets:
                self._bind(target, value, frame)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                frame.names.pop(ast.unparse(target), None)
        elif isinstance(statement, ast.Expr):
            self._evaluate(statement.value, frame)

    def _bind(self, target: ast.expr, value: Any, frame: _Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, list | tuple):
            for inner, one in zip(target.elts, value, strict=True):
                self._bind(inner, one, frame)

    def _evaluate(self, node: ast.expr | None, frame: _Frame) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return frame.names.get(node.id)
        if isinstance(node, ast.Tuple | ast.List):
            return [self._evaluate(one, frame) for one in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        if isinstance(node, ast.Subscript):
            whole, index = self._evaluate(node.value, frame), self._evaluate(node.slice, frame)
            return whole[index] if isinstance(whole, list) and isinstance(index, int) else None
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return operator.mul(self._evaluate(node.left, frame), self._evaluate(node.right, frame))
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return ast.literal_eval(node)
        return None

    def _attribute(self, node: ast.Attribute) -> Any:
        name = ast.unparse(node)
        found = getattr(torch, name.removeprefix("torch."), None) if "torch." in name else None
        return found if isinstance(found, torch.dtype | torch.memory_format) else None

    def _call(self, node: ast.Call, frame: _Frame) -> Any:
        name = self._resolve(ast.unparse(node.func))
        if name.startswith(_IGNORED):
            if name.startswith(("assert_size_stride", "assert_tensor_metadata")):
                self._check(name, [self._evaluate(one, frame) for one in node.args])
            return None
        args = [self._evaluate(one, frame) for one in node.args]
        kwargs = {k.arg: self._evaluate(k.value, frame) for k in node.keywords if k.arg}
        kernel = self._module.kernels.get(name.removesuffix(".run"))
        if kernel is not None:
            return self._kernel(kernel, args)
        if name in self._module.functions or name.startswith("self.partitions["):
            return self._subgraph(name, args)
        if name.startswith("empty_strided"):
            return self._empty(args, kwargs)
        if name == "reinterpret_tensor":
            buffer, size, stride, offset = args
            return buffer.viewed(_at(buffer.tensor, size, stride, offset, buffer.tensor.dtype))
        if name == "alloc_from_pool":
            pool, offset, dtype, size, stride = args
            return pool.viewed(_at(pool.tensor, size, stride, offset // dtype.itemsize, dtype))
        return self._operation(name, args, kwargs)

    def _resolve(self, name: str) -> str:
        """Spell out what a module calls by another name."""
        head, dot, rest = name.partition(".")
        found = self._module.aliases.get(head)
        return name if found is None or found.startswith("torch._C") else f"{found}{dot}{rest}"

    def _check(self, name: str, args: list[Any]) -> None:
        """Compare a buffer with what the code expects of it."""
        one_of = zip(*args[:3], strict=True) if "grouped" in name else [args[:3]]
        for buffer, size, stride in one_of:
            if isinstance(buffer, Buffer):
                found = (list(buffer.tensor.shape), list(buffer.tensor.stride()))
                assert found[0] == size, f"expected {size}, {stride}, found {found}"

    def _empty(self, args: list[Any], kwargs: dict[str, Any]) -> Buffer:
        dtype = kwargs.get("dtype") or next(a for a in args if isinstance(a, torch.dtype))
        return self.allocate(torch.empty_strided(*args[:2], dtype=dtype, device="meta"))

    def _subgraph(self, name: str, args: list[Any]) -> list[Any]:
        if name.startswith("self.partitions["):
            name = f"partition_{name.split('[')[1].rstrip(']')}"
        (arguments,) = args
        return self._function(self._module.functions[name], arguments)

    def _kernel(self, kernel: Kernel, args: Sequence[Any]) -> None:
        sums: dict[str, int] = {}
        for store in kernel.stores:
            target = args[store.argument]
            numel = store.numel
            nbytes = target.nbytes if numel is None else numel * target.tensor.itemsize
            sums[store.kind] = sums.get(store.kind, 0) + min(nbytes, target.nbytes)
        flops = 0
        if any(part in kernel.name for part in ("_gemm", "tem_fused", "template")):
            flops = _product_flops([a.tensor for a in args if isinstance(a, Buffer)])
        for kind, nbytes in sums.items():
            of_kind = flops if kind == "compute" else 0
            self._add(kind, kernel.name, nbytes=nbytes, flops=of_kind)

    def _operation(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors without data."""
        if name.startswith("extern_kernels."):
            return self._extern(name.removeprefix("extern_kernels."), args, kwargs)
        words = name.removeprefix("torch.ops.").split(".")
        is_collective = words[0] in _NAMESPACES
        if is_collective and words[1] == "wait_tensor":
            return self._wait(args[0])
        buffers = list(_buffers([args, kwargs]))
        made = self._on_meta(name, args, kwargs)
        if is_collective and words[1].startswith(COLLECTIVES):
            assert made is not None, f"{name} was not understood"
            self._issue(words[1], buffers, list(_buffers([made])))
            return made
        kind = self._kind(words, buffers, made)
        if kind:
            written = list(_buffers([made])) or buffers[:1]
            flops = self._flops(words[1], args, made) if kind == "compute" else 0
            nbytes = sum(buffer.nbytes for buffer in written)
            self._add(kind, ".".join(words), nbytes=nbytes, flops=flops)
        return made

    def _kind(self, words: list[str], buffers: list[Buffer], made: Any) -> str:
        if not buffers:
            return ""  # no tensor takes part: a stream, a device
        if words[0] != "aten" or made is None:
            name = words[1] if len(words) > 1 else words[0]
            return "compute" if any(part in name for part in _PRODUCTS) else "unknown"
        if words[1] in _COPIES:
            dtypes = {buffer.tensor.dtype for buffer in [*buffers, *_buffers([made])]}
            return "cast" if len(dtypes) > 1 else "copy"
        if words[1].endswith("_"):
            return "compute"
        known = [buffer.memory for buffer in buffers]
        is_view = all(any(b.memory is memory for memory in known) for b in _buffers([made]))
        return "" if is_view else "compute"

    def _extern(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        made = self._on_meta(f"torch.ops.aten.{name}", args, kwargs)
        written = sum(buffer.nbytes for buffer in _buffers([made]))
        self._add("compute", name, nbytes=written, flops=self._flops(name, args, made))
        return made

    def _flops(self, name: str, args: list[Any], made: Any) -> int:
        """Count a product's operations as torch does; 0 for anything else."""
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        tensors, out = _tensors(args), _tensors(made)
        if count is not None:
            return int(count(*tensors, out_val=out))
        if any(part in name for part in _PRODUCTS):
            found = [*_buffers([args]), *_buffers([made])]
            return _product_flops([buffer.tensor for buffer in found])
        return 0

    def _on_meta(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors without data; return buffers, or None if it cannot."""
        if "out" in kwargs:
            return kwargs["out"]
        if name.split(".")[-2].endswith("_"):
            return args[0]
        known = {b.tensor.untyped_storage()._cdata: b.memory for b in _buffers([args, kwargs])}
        if not known:
            return None
        try:
            result = _find(name)(*_tensors(args), **_tensors(kwargs))
        except (AttributeError, RuntimeError, NotImplementedError, TypeError):
            return None
        return self._wrap(result, known)

    def _wrap(self, result: Any, known: dict[int, Memory]) -> Any:
        if isinstance(result, Tensor):
            memory = known.get(result.untyped_storage()._cdata)
            return self.allocate(result) if memory is None else Buffer(result, memory)
        if isinstance(result, list | tuple):
            return [self._wrap(one, known) for one in result]
        return result

    def _issue(self, name: str, read: list[Buffer], made: list[Buffer]) -> None:
        id_ = self._issued
        self._issued += 1
        outputs = [buffer.memory for buffer in made]
        inputs = [b for b in read if not any(b.memory is memory for memory in outputs)]
        nbytes = max(sum(b.nbytes for b in inputs), sum(b.nbytes for b in made))
        dtypes = sorted({str(buffer.tensor.dtype).removeprefix("torch.") for buffer in made})
        short = next(kind for kind in COLLECTIVES if name.startswith(kind))
        if "coalesced" in name:
            short += "_coalesced"
        self._add("issue", short, nbytes=nbytes, dtype="/".join(dtypes), ids=(id_,))
        self._held[id_] = [*read, *made]
        for buffer in made:
            buffer.memory.in_flight.append(id_)

    def _wait(self, buffer: Buffer) -> Buffer:
        ids = tuple(buffer.memory.in_flight)
        buffer.memory.in_flight.clear()
        self._add("wait", ids=ids)
        for id_ in ids:
            self._held.pop(id_, None)
        return buffer


def _find(name: str) -> Callable[..., Any]:
    found: Any = torch
    for word in name.removeprefix("torch.").split("."):
        found = getattr(found, word)
    return found  # type: ignore[no-any-return]  # an attribute of torch


def _buffers(values: Any) -> Iterator[Buffer]:
    if isinstance(values, Buffer):
        yield values
    elif isinstance(values, dict):
        yield from _buffers(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _buffers(value)


def _tensors(values: Any) -> Any:
    if isinstance(values, Buffer):
        return values.tensor
    if isinstance(values, dict):
        return {key: _tensors(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_tensors(value) for value in values]
    return values


def _at(
    tensor: Tensor, size: list[int], stride: list[int], offset: int, dtype: torch.dtype
) -> Tensor:
    """Return a view of a tensor's memory; the offset counts from the tensor's own."""
    if dtype is not tensor.dtype:
        raw = torch.empty(0, dtype=dtype, device="meta")
        return raw.set_(tensor.untyped_storage(), offset, size, stride)
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _product_flops(tensors: list[Tensor]) -> int:
    """Guess 2 M N K of a product: the output is the last, K the last dim of a matrix before it."""
    matrices = [tensor for tensor in tensors[:-1] if tensor.dim() >= 2]
    return 2 * tensors[-1].numel() * matrices[0].shape[-1] if matrices and tensors else 0
