"""The only user of private torch API. Each name states why it is needed.

Tried on torch 2.11.0 and 2.13.0. Nothing here knows what a unit or a group is. The public names of
torch's own FSDP2 that other software asks about come in here too, and nowhere else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable, forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # for preserved_versions
from torch.distributed._composable.contract import (  # what `replicate` and the like read
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,  # a parameter made of a collective's result; tried on 2.13.0 only
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as FSDPModule  # what isinstance checks ask about
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle
from torch.distributed.fsdp import fully_shard  # for its accessor alone
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta  # both for make_spec
from torch.distributed.tensor.placement_types import _StridedShard  # TP and FSDP on one dim
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,  # the test torch itself uses
)
from torch.utils.checkpoint import (  # what selective checkpointing sees operations with
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

Function = TypeVar("Function", bound=Callable[..., Any])

# DTensor: a step builds a gradient DTensor for each parameter. The public ``DTensor.from_local``
# costs eight times as much as the constructor, because it builds the spec each time.


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Build the metadata that ``new_dtensor`` takes, once for many tensors."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def new_dtensor(
    local: torch.Tensor, spec: DTensorSpec, like: torch.Tensor | None = None
) -> DTensor:
    """Wrap a local tensor; the caller answers for its shape.

    ``like`` has the same shape, dtype and device, and offset 0, which ``local`` may not have: torch
    takes a wrapper with an offset for a tensor with memory, and fails to copy or pickle it.
    """
    if like is None:
        return DTensor(local, spec, requires_grad=False)
    tensor = DTensor(like, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def as_parameter(tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a tensor that nothing else holds.

    ``nn.Parameter`` detaches a DTensor, and DTensor plans that op anew for each shape and mesh:
    1.5 ms a parameter, nine tenths of ``fully_shard``. There is nothing to detach from, so the flag
    that ``nn.Parameter`` would set does, on the tensor itself.
    """
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    tensor._is_param = True  # what `isinstance` looks for; tried on 2.13.0 only
    tensor.requires_grad = requires_grad  # the method is refused under functorch's transforms
    return cast(nn.Parameter, tensor)


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's own local tensor; ``to_local()`` would view it, and enter autograd."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]  # of a DTensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor keep its values in other memory (the group's flat buffer)."""
    tensor._local_tensor = local


get_local_tensor = attrgetter("_local_tensor")
get_spec = attrgetter("_spec")
"""``local_tensor`` and ``spec_of`` for ``map``: an optimizer step asks for hundreds of each."""


DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside it an attribute of a subclass is read without looking for its ``__torch_function__``."""


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a shard of a shard: this axis splits what later axes split first."""
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """True if the placement splits the tensor along ``dim``, strided or not."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def is_strided(placement: Placement) -> bool:
    """True if this axis splits what later axes split first."""
    return isinstance(placement, _StridedShard)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from (itself if it was not)."""
    return mesh._get_root_mesh()


def flatten_dims(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return several dims of a mesh as one dim, the first name slowest. No public way exists.

    Torch keeps the result on the root mesh, under the joined names, so it is made once.
    """
    part = mesh if names == tuple(mesh.mesh_dim_names or ()) else mesh[names]
    return part._flatten()


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the axes of several meshes, in this order and with their groups, as one mesh.

    Public slicing of the root keeps the root's order of axes, knows no flattened or unflattened
    axes, and needs the root: DTensor's caches hand out an *equal* mesh, which may be a slice of
    another root.

    Raises:
        RuntimeError: the meshes share an axis, or are not over the same ranks.
    """
    return DeviceMesh._concatenate([*meshes])


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def is_on_its_way(tensor: torch.Tensor) -> bool:
    """True for the result of a functional collective, which is a plain tensor once it is read."""
    return isinstance(tensor, AsyncCollectiveTensor)


def is_persistent(module: nn.Module, name: str) -> bool:
    """True if a buffer is in its module's ``state_dict``. No public way exists."""
    return name not in module._non_persistent_buffers_set


# Autograd.


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once the running backward is over. No public way exists.

    The engine drops its reference when that backward ends, by an error too.
    """
    Variable._execution_engine.queue_callback(callback)


def graph_task_id() -> int:
    """Return the running backward's number in this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


def computes_gradient(param: torch.Tensor) -> bool:
    """True if the running backward computes the gradient of a leaf. The public API does not tell.

    The engine refuses to answer about leaves that ``torch.autograd.grad`` was asked for by name.
    """
    accumulate = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:
        return True


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of."""
    return tensor._base


def apply_gradient_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a leaf's ``register_hook`` hooks, which autograd runs for gradients that it computes."""
    for hook in (param._backward_hooks or {}).values():
        replaced = hook(grad)
        if replaced is not None:
            grad = replaced
    return grad


def have_hooks(params: Sequence[torch.Tensor]) -> bool:
    """True if something is to be called when one of these leaves gets its gradient."""
    for param in params:  # noqa: SIM110  # a generator costs more
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            return True
    return False


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Run a leaf's ``register_post_accumulate_grad_hook`` hooks, as autograd would."""
    for hook in tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give hooks that the user put on a parameter to the one that takes its place."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


# Collectives and kernels.

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public names; torch 2.13 renamed them and warns at each use of the old ones."""


def is_gloo(group: dist.ProcessGroup) -> bool:
    """True if a group's collectives on host memory are gloo's."""
    known = _on_gloo.get(group)
    if known is None:
        backends = dist.get_backend_config(group).split(",")
        known = any(backend in ("gloo", "cpu:gloo") for backend in backends)
        _on_gloo[group] = known
    return known


_on_gloo: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()

EXIT_PAUSE_S = 0.02


@functools.cache
def pause_at_exit() -> None:
    """Give a backend's threads, once this process ends, the moment in which they let go of tensors.

    A thread of gloo's drops the tensors of its last collective after it has told that this is done,
    and needs the interpreter's lock for that. Where it asks for the lock of an interpreter that is
    already ending (Python before 3.14), the process aborts after its last line, with ``terminate
    called without an active exception``. torch's caches of DTensor plans keep the group alive, so
    that destroying it does not end its threads.
    """
    atexit.register(time.sleep, EXIT_PAUSE_S)


def coalesced(group: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Issue what is inside as one operation, where a device's backend can. No public way exists."""
    if group is None or device.type == "cpu":
        return contextlib.nullcontext()
    manager: AbstractContextManager[Any] = vars(dist)["_coalescing_manager"](group, device)
    return manager


def allocate_from_group(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return memory of the backend's own allocator; None if it has none. No public way exists."""
    backend: Any = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    tensor: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


class SymmetricMemory:
    """Memory that all ranks of a group map; torch has it as a private module."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric  # heavy, and for CUDA alone

        self._module: Any = symmetric
        self._group = group
        self._module.set_backend(backend)
        dist.barrier(group=group)  # the communicator must exist before the first rendezvous

    def empty(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._module.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor) -> None:
        self._module.rendezvous(tensor, group=self._group.group_name)


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Run what is inside where no dispatch mode (a counter, a tracer) sees it."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def has_real_memory() -> bool:
    """True unless tensors made now are fake (an estimate of memory, a trace)."""
    return type(torch.empty(0, dtype=torch.uint8, device="cpu")) is torch.Tensor


def bytes_of(tensor: torch.Tensor, nbytes: int) -> bytes:
    """Return the first bytes of a contiguous tensor in host memory.

    Comparing them with known ones takes a fifth of the instructions of ``torch.equal``.
    """
    return ctypes.string_at(tensor.data_ptr(), nbytes)


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor in host memory over another one, as a collective would."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def chunk_cat(tensors: list[torch.Tensor], size: int, out: torch.Tensor) -> None:
    """Write ``size`` padded chunks of every tensor's dim 0 into the rows of ``out`` and cast.

    One kernel for a whole group on CUDA; the public ``chunk`` and ``cat`` take one for each.
    """
    torch._chunk_cat(tensors, 0, size, out=out)


def norms_of(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the vector norm of each tensor: a few kernels for all of them on a device."""
    return list(torch._foreach_norm(list(tensors), order))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors over others of the same shapes."""
    torch._foreach_copy_(targets, sources)


def scale_all_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place: a few kernels for all of them on a device."""
    torch._foreach_mul_(list(tensors), factor)


def zero_all_(tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors of one device and dtype with zeros: a few kernels for all on a device."""
    torch._foreach_zero_(list(tensors))


def lerp_all_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move each tensor towards its end by ``weight``, in place: a few kernels for all of them."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(ends), weight)


fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
"""The kernels of ``Adam(fused=True)``, which ``torch.optim`` calls with lists of tensors."""


def custom_policy_function(policy: CustomPolicy) -> Callable[[nn.Module], Any]:
    """Return the function of a module that the user made the policy of."""
    function: Callable[[nn.Module], Any] = policy._lambda_fn
    return function


# References: whether a buffer may be reused. See [Note: reused gradients] in _gradients.


def count_references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many owners each DTensor and its local tensor have, in Python and in C++."""
    counts = []
    for tensor in tensors:
        local = tensor._local_tensor  # type: ignore[attr-defined]  # of a DTensor
        counts.append(sys.getrefcount(tensor))
        counts.append(tensor._use_count())  # type: ignore[attr-defined]  # not in the stubs
        counts.append(sys.getrefcount(local))
        counts.append(local._use_count())
    return counts


def count_owners(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return how many owners each plain tensor has, in Python and in C++."""
    counts = []
    for tensor in tensors:
        counts.append(sys.getrefcount(tensor))
        counts.append(0 if tensor is None else tensor._use_count())  # type: ignore[attr-defined]
    return counts


@torch.inference_mode(False)
def accumulators_of(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Return the nodes that accumulate the gradients of leaves; each owns its leaf."""
    edge = torch.autograd.graph.get_gradient_edge
    return [edge(t).node for t in tensors if t is not None and t.requires_grad]


def is_packing_saved_tensors() -> bool:
    """True inside of ``torch.autograd.graph.saved_tensors_hooks``, as under checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


version_of = attrgetter("_version")
"""How often a tensor was written in place; for ``map``: a step asks for hundreds."""


_storage_of = methodcaller("untyped_storage")
_number_of = attrgetter("_cdata")


def shells_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return what identifies the empty storage of each DTensor, which ``.data = ...`` changes.

    Nothing else tells: the assignment leaves the local tensor and both versions as they are.
    """
    return list(map(_number_of, map(_storage_of, tensors)))


def preserved_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """Hide in-place writes from autograd: what it saved is being filled again with its values."""
    manager: AbstractContextManager[Any] = _unsafe_preserve_version_counter(tensors)
    return manager


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and objects share a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


# Modes and transforms that a forward may run under. No public way to step out of them exists.

_count_modes = torch._C._len_torch_dispatch_stack
_transforms_are_active = torch._C._are_functorch_transforms_active
_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def is_under_modes() -> bool:
    """Return True if a dispatch mode or a functorch transform is active. Costs two C calls."""
    return _count_modes() > 0 or _transforms_are_active()


def is_under_transforms() -> bool:
    """Return True if tensors may consist of several: functorch's wrappers, dual numbers."""
    return _transforms_are_active() or forward_ad._current_level >= 0


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every tensor that a value consists of and that may have a history of its own.

    Under ``jvp`` that is a wrapper, its tangent, and what both of them wrap.
    """
    functorch = torch._C._functorch
    active = functorch.get_interpreter_stack() or ()
    dual = {i.level() for i in active if i.key() == functorch.TransformType.Jvp} or {-1}
    found = [tensor]
    for layer in found:
        if forward_ad._current_level >= 0 and functorch.maybe_get_level(layer) in dual:
            tangent = forward_ad.unpack_dual(layer).tangent
            if tangent is not None:
                found.append(tangent)
        if functorch.is_functorch_wrapped_tensor(layer):
            found.append(functorch.get_unwrapped(layer))
    return found


def run_aside(function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` where selective checkpointing and functorch transforms do not reach it.

    What the engine does is no part of the user's function: a recomputation may find the parameters
    gathered, and its policy must count the same operations as in forward. Other dispatch modes
    (``CommDebugMode``) go on seeing everything.
    """
    with _unseen():
        if _transforms_are_active():
            with torch._C._DisableFuncTorch():
                function(*args)
        else:
            function(*args)


def unseen_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the whole tensor that selective checkpointing does not count."""
    if _count_modes() == 0:
        return tensor.view_as(tensor)
    with _unseen():
        return tensor.view_as(tensor)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Take the modes of selective checkpointing off the stack of dispatch modes for a while."""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(_count_modes())]
    others = [mode for mode in modes if not isinstance(mode, _CHECKPOINT_MODES)]
    if len(others) == len(modes):
        yield
        return
    _exchange_modes(modes, others)
    try:
        yield
    finally:
        _exchange_modes(others, modes)


def _exchange_modes(old: Sequence[Any], new: Sequence[Any]) -> None:
    for _ in old:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in new:
        torch._C._push_on_torch_dispatch_stack(mode)


# Compilation. The public ``torch.compiler.disable`` imports the compiler, which takes seconds, and
# puts a wrapper around every call. These two set what it sets, and cost a call nothing.


def never_traced(function: Function) -> Function:
    """Let the compiler break its graph at a call of ``function``, and not compile it (decorator).

    What ``function`` calls is compiled, if the compiler is running.
    """
    _skip_frames(function, with_callees=False)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # on a function
    return function


def always_eager(function: Function) -> Function:
    """As ``never_traced``, and what ``function`` calls is not compiled either (decorator)."""
    _skip_frames(function, with_callees=True)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # on a function
    return function


def eager_unless_inlined(function: Function) -> Function:
    """Let the compiler trace ``function`` as a part of a graph only (decorator).

    Called on its own while the compiler is running, it is not compiled, nor is what it calls.
    """
    _skip_frames(function, with_callees=True)
    return function


def inlined_or_eager(function: Function) -> Function:
    """As ``eager_unless_inlined``, but what ``function`` calls is compiled, if that is not traced.

    For what stands around a user's module: on its own it is not worth a graph.
    """
    _skip_frames(function, with_callees=False)
    return function


def _skip_frames(function: Callable[..., Any], with_callees: bool) -> None:
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    callees = skip if with_callees else frames._FrameAction.DEFAULT
    code = function.__code__
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, callees))


@never_traced
def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``module.compile()`` made, which runs the module's hooks and forward."""
    return module._compiled_call_impl


call_with_hooks: Callable[..., Any] = nn.Module._call_impl
"""What ``nn.Module.__call__`` calls: one stack frame less for each unit inside another."""


def in_graph(*functions: Callable[..., Any]) -> None:
    """Let the compiler put calls of these functions into its graph, and not look into them."""
    for function in functions:
        torch.compiler.allow_in_graph(function)


def find_compiler(
    backend: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
    change: Callable[[torch.fx.Graph], None] | None = None,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
    """Return what ``torch.compile`` would call with each graph. No public way exists.

    ``change`` sees the forward and the backward graph before they are lowered (``"inductor"``) or
    run (``"aot_eager"``).
    """
    if backend == "inductor":
        compiler = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        return compiler if change is None else _changed_inductor(compiler, change)
    if change is None:
        return torch._TorchCompileWrapper(backend, mode, options, dynamic)
    return _changed_aot_eager(change)


def _changed_inductor(
    compiler: Callable[..., Any], change: Callable[[torch.fx.Graph], None]
) -> Callable[..., Any]:
    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        import torch._inductor.config as config

        with config.patch(post_grad_custom_post_pass=change):
            return compiler(graph, inputs)

    return compile_graph


def _changed_aot_eager(change: Callable[[torch.fx.Graph], None]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        change(graph.graph)
        graph.recompile()

        def run(arguments: list[Any]) -> Any:
            held = list(arguments)
            arguments.clear()  # the caller keeps none of them alive
            return graph(*held)

        run._boxed_call = True  # type: ignore[attr-defined]  # says that it takes a list
        return run

    made: Callable[..., Any] = aot_autograd(
        fw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    return made


def collective_of(node: torch.fx.Node) -> str:
    """Return the name of the functional collective that a node is, or an empty string."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional":
        return target._schema.name.split("::")[1]
    return ""


def writes_in_checkpoints() -> AbstractContextManager[Any]:
    """Let the compiler trace writes to modules inside ``torch.utils.checkpoint``.

    Its recomputation leaves them out, which is right for parameters that are registered before a
    module runs and forgotten after it.
    """
    import torch._dynamo.config as config

    patched: AbstractContextManager[Any] = config.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True
    )
    return patched


def recompute_in_backward(node: torch.fx.Node) -> None:
    """Let the partitioner compute a node of a compiler's graph again in backward.

    The tags are those of selective checkpointing. The number is larger than that of any region of a
    user's checkpoint, because what is used in a later region would be saved instead.
    """
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30


# Functional collectives: the operations that compilers know. Process groups go by their names.


def functional_all_gather(sent: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return what all ranks of a group sent, one behind the other."""
    ops = torch.ops._c10d_functional
    gathered: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(sent, size, group))
    return gathered


def functional_reduce_scatter(sent: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """Return this rank's part of what all ranks sent, joined."""
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(sent, op, size, group))
    return reduced


def functional_all_reduce(sent: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Return what all ranks sent, joined."""
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(ops.all_reduce(sent, op, group))
    return reduced


# Observation and composition.


def profiler_is_running() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def register_composable_name(module: nn.Module, name: str) -> None:
    """Enter a name in the registry of composable APIs, which ``replicate`` and the like read.

    The public decorator ``contract`` builds the state itself and checks every name of the tree
    again at each call, which costs quadratic time over a model's units.
    """
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def register_torch_state(module: nn.Module, state: object) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``.

    The accessor, itself public, looks under the function that the decorator ``contract`` wrapped.
    """
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state


def composable_names(module: nn.Module) -> list[str]:
    """Return the composable APIs that were applied to the module."""
    return list(module.__dict__.get(REGISTRY_KEY, {}))


def forget_composable_names(state: dict[str, Any]) -> None:
    """Drop the registry from a module's state before it is pickled: its key is per process."""
    state.pop(STATE_KEY, None)
    state.pop(REGISTRY_KEY, None)
