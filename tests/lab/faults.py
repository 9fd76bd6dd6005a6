"""Faults that the tests must find: small changes of the package, each of which breaks something.

Data for `scripts/mutants`. `tests.lab.plant` finds the place of a fault: a function by its name, and Python
inside it, whatever the file, the layout and the local names. Whoever rewrites that code mends the fault; a
fault of code that is gone makes room for one of what replaced it.
"""

# ruff: noqa: E501  # what a fault breaks is said in one string

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of one function or class."""

    name: str
    file: str  # a hint: looked at first, and the whole package if the function is not there
    where: str  # the function or class by its qualified name; "" is the whole module
    old: str  # Python that stands once inside it; `tests.lab.plant` has the rules
    new: str  # what takes its place; nothing, if that is all
    breaks: str  # what a user would see
    near: tuple[str, ...]  # files of tests that are about it; they are tried first


FAULTS = [
    Fault(
        "dropped-accumulation-uses-old-values",
        "fsdp2/_core/engine/tree.py",
        "Staying.begin_forward",
        "is_evaluation or self._gradients is None or self._look() != self._gradients",
        "is_evaluation",
        "With shard= an accumulation is given up (zero_grad), shards are written by p.data or NumPy, and the next forward uses the whole parameters of before.",
        near=("behaviour/test_sharding_modes.py",),
    ),
    Fault(
        "inner-sums-are-mixed-up",
        "fsdp2/_core/params/reduce.py",
        "Reduction._pairs_inside",
        "part[row]",
        "part[-1 - row]",
        "With shard_outer ranks of the outer dim get each other's shards of gradients.",
        near=("behaviour/test_outer_sharding.py",),
    ),
    Fault(
        "toggle-of-whole-parameter-unseen",
        "fsdp2/_core/params/registration.py",
        "Registration.detect_changes",
        """
        sharded.requires_grad is not trainable or (
            unsharded is not None and unsharded.requires_grad is not trainable
        )
        """,
        "sharded.requires_grad is not trainable",
        "requires_grad_(False) on a parameter while it is whole (after unshard(), or on a root that stays whole) is not carried over: after the reshard the sharded parameter still says that it is trainable.",
        near=("behaviour/test_surprises.py",),
    ),
    Fault(
        "agreement-never-uncertain",
        "fsdp2/_core/agreement/agreement.py",
        "Predictions.learn",
        """
        if known == UNCERTAIN:
            ...
        else:
            self.first[recent] = UNCERTAIN
        _count(self._runs, recent, number)
        """,
        """
        if known == UNCERTAIN:
            ...
        else:
            self.first[recent] = number
        _count(self._runs, recent, number)
        """,
        "A place where two programs alternate is never marked uncertain: each alternation issues a whole stand-in collective of the other program instead of the tiny exchange of numbers.",
        near=("unit/test_consistency.py",),
    ),
    Fault(
        "reshard-to-one-rank-frees",
        "fsdp2/_core/api/fully_shard.py",
        "fully_shard",
        "reshard_after_forward is True or reshard_after_forward > 1",
        "reshard_after_forward is True or reshard_after_forward >= 1",
        "reshard_after_forward=1 means True instead of False: parameters are freed after forward and gathered again in backward (one reshard and one unshard event more for each unit).",
        near=("unit/test_order.py",),
    ),
    Fault(
        "dim-cut-twice-loses-first-offset",
        "fsdp2/_core/transfer/chunk_plan.py",
        "Blocks.block",
        "starts[dim] += first",
        "starts[dim] = first",
        "Where tensor parallelism and data parallelism (or several dims) cut the same dim, a block starts at the wrong row: full state, loading, full_params and summon_full_params put values in wrong places.",
        near=("behaviour/test_summon.py",),
    ),
    Fault(
        "stand-in-no-replicate-sum",
        "fsdp2/_core/params/functional_call.py",
        "_GatherShard.backward",
        "data.replicate.size > 1",
        "data.replicate.size > 1 and data.shard.size == 1",
        "On a 2-D (HSDP) mesh the gradient of a shard that stands in (functional_call) is not averaged over the replicas: replicas get different, wrong gradients.",
        near=("behaviour/test_autograd.py",),
    ),
    Fault(
        "nested-modules-of-a-list-kept",
        "fsdp2/_core/api/collect.py",
        "_outermost",
        "[top for top in unique if top not in inner]",
        "unique",
        "fully_shard([block, block.linear]) makes the inner module an FSDPModule with hooks of its own too, instead of dropping a module that lies inside another one of the list.",
        near=("behaviour/test_control.py",),
    ),
    Fault(
        "clip-scales-small-gradients-up",
        "fsdp2/optim/_clip.py",
        "_clip",
        "(max_norm / (total + 1e-6)).clamp(max=1.0)",
        "max_norm / (total + 1e-6)",
        "clip_grad_norm_ with a max_norm above the total norm multiplies gradients up to it instead of leaving them as they are.",
        near=("behaviour/test_clip.py",),
    ),
    Fault(
        "collect-fqn-loses-prefix",
        "fsdp2/_core/api/collect.py",
        "_managed",
        'f"{prefix}.{name}" if prefix else name',
        "name",
        "A parameter two or more modules below its unit is named by its last module alone: errors say 'lin.weight' for 'inner.lin.weight'.",
        near=(
            "behaviour/test_errors.py",
            "unit/test_errors.py",
            "behaviour/test_parameter_meshes.py",
        ),
    ),
    Fault(
        "shard-inside-summon-accepted",
        "fsdp2/_core/api/collect.py",
        "_check_param",
        "param.__dict__.get(SUMMONED) is not None",
        "param.__dict__.get(SUMMONED) is not None and isinstance(param, DTensor)",
        "fully_shard inside summon_full_params is not refused: it shards the temporary whole parameters of another unit, which leaving the context then takes away.",
        near=("behaviour/test_summon.py",),
    ),
    Fault(
        "mean-divided-twice",
        "fsdp2/_core/params/planning.py",
        "GradientScale.choose",
        """
        if dtype == torch.float16:
            ...
            return GradientScale(1.0 / before, before / factor)
        if divide_by is None and not only_sums and ranks > 1:
            return GradientScale(1.0, 1.0, dist.ReduceOp.AVG)
        """,
        """
        if dtype == torch.float16:
            ...
            return GradientScale(1.0 / before, before / factor)
        if divide_by is None and not only_sums and ranks > 1:
            return GradientScale(1.0, 1.0 / factor, dist.ReduceOp.AVG)
        """,
        "Gradients that the backend averages are divided by the number of ranks once more: with two ranks every gradient is half of the right one.",
        near=("unit/test_collectives.py",),
    ),
    Fault(
        "comm-hook-stays-on-replicate-axis",
        "fsdp2/_core/api/comm_hooks.py",
        "register_comm_hook",
        "group.wire.scatter, group.wire.sum_replicas = DefaultReduceScatter(), None",
        "group.wire.scatter = DefaultReduceScatter()",
        "After register_comm_hook(model, None) on an HSDP mesh the hook that was taken away is still called for the sum over replicas.",
        near=("behaviour/test_comm_hooks.py",),
    ),
    Fault(
        "compiled-model-lost-by-chaining",
        "fsdp2/_compiled/compile.py",
        "_delegate",
        "self if result is model else result",
        "result",
        "compiled.train(), .eval(), .to() return the eager model: model = model.eval() silently runs without the compiler from then on.",
        near=("behaviour/test_traced.py",),
    ),
    Fault(
        "reshard-setting-keeps-smaller-mesh",
        "fsdp2/_core/api/settings.py",
        "ControlSurface.set_reshard_after_forward",
        "group.reshard_to(None)",
        "group.reshard()",
        "After fully_shard(reshard_after_forward=2) a call of set_reshard_after_forward(True) still reshards to the smaller mesh: memory and the registered DTensors' mesh show it.",
        near=("behaviour/test_ranks_alone.py",),
    ),
    Fault(
        "mean-of-two-ranks-not-divided",
        "fsdp2/_core/comm/gloo_p2p.py",
        "Exchange.wait",
        """
        if first.dtype == output.dtype and not others:
            ...
        else:
            ...
        if self._is_mean:
            ...
        """,
        """
        if first.dtype == output.dtype and not others:
            ...
        else:
            ...
        if self._is_mean and others:
            ...
        """,
        "On two gloo ranks the reduce-scatter of a large buffer gives the sum, not the mean: gradients of large parameters are twice what they should be (or, in a packed buffer, the check of ranks raises).",
        near=("behaviour/test_copy_free.py",),
    ),
    Fault(
        "ema-decay-function-off-by-one",
        "fsdp2/optim/_ema.py",
        "EMA.update",
        "self.decay(self.updates)",
        "self.decay(self.updates + 1)",
        "A decay function is called with 1 at the first update, not 0: a warm-up of the decay is one step ahead and the averages differ.",
        near=("behaviour/test_conveniences.py",),
    ),
    Fault(
        "count-takes-a-bool",
        "fsdp2/_core/base/arguments.py",
        "check_count",
        "isinstance(value, bool) or not isinstance(value, int)",
        "not isinstance(value, int)",
        "A flag in the place of a count is taken for 1: max_bytes=True streams byte by byte.",
        near=("behaviour/test_control_surface.py",),
    ),
    Fault(
        "interrupt-in-together-unheard",
        "fsdp2/_core/comm/process_mesh.py",
        "Grid.together",
        """
        try:
            ...
        except BaseException as caught:
            error = caught
        """,
        """
        try:
            ...
        except Exception as caught:
            error = caught
        """,
        "Ctrl-C on one rank while it works for all (extra being pickled) leaves the others in a collective.",
        near=("behaviour/test_lost_ranks.py",),
    ),
    Fault(
        "config-error-is-no-value-error",
        "fsdp2/_core/base/errors.py",
        "ConfigError",
        "class ConfigError(FSDPError, ValueError): ...",
        "class ConfigError(FSDPError): ...",
        "A user's `except ValueError` around fully_shard no longer catches a wrong argument.",
        near=("behaviour/test_errors.py", "unit/test_errors.py"),
    ),
    Fault(
        "listener-stays-after-an-exception",
        "fsdp2/_core/base/events.py",
        "listen",
        """
        try:
            yield
        finally:
            listeners.remove(listener)
        """,
        """
        yield
        listeners.remove(listener)
        """,
        "A listener whose `with listen(...)` was left by an exception hears every later event, forever.",
        near=("unit/test_events.py",),
    ),
    Fault(
        "extension-failure-of-one-parameter-unsaid",
        "fsdp2/_core/params/extension.py",
        "ExtensionTail.write",
        "any(item.error is not None for item in self.items)",
        "all(item.error is not None for item in self.items)",
        "Where a group has two extended parameters and fsdp_pre_all_gather of one fails in a later step, no rank raises: all go on with what happened to be in the buffer.",
        near=("behaviour/test_extension_errors.py", "unit/test_extension.py"),
    ),
    Fault(
        "extension-inner-tensors-never-freed",
        "fsdp2/_core/params/extension.py",
        "Extension.free",
        """
        for storage, _ in self._storages:
            ...
        """,
        """
        for storage, _ in self._storages[: len(self._outputs)]:
            ...
        """,
        "Inner tensors with memory of their own that fsdp_post_all_gather returned keep it when the group reshards: whole parameters stay in memory.",
        near=("behaviour/test_extension_memory.py", "unit/test_extension.py"),
    ),
    Fault(
        "extra-tensors-renumbered",
        "fsdp2/checkpoint/_extra.py",
        "packed",
        "{n: t for n, t in numbered if not isinstance(t, DTensor)}",
        "dict(enumerate(t for _, t in numbered if not isinstance(t, DTensor)))",
        "A checkpoint's extra in which a plain tensor follows a DTensor cannot be loaded (KeyError), or comes back with the wrong tensors in its places.",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "other-files-in-checkpoint-folder-lost",
        "fsdp2/checkpoint/_place.py",
        "retire",
        "not (heir / entry.name).exists()",
        "(heir / entry.name).exists()",
        "Saving over a checkpoint deletes what the user had put into its folder (a config, a tokenizer) instead of moving it to the new one.",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "background-save-of-later-steps",
        "fsdp2/checkpoint/_save.py",
        "save",
        "saving.copy(room_of(model))",
        "room_of(model)",
        "A save in the background writes what the parameters are when it is their turn, so it mixes values of several steps.",
        near=("behaviour/test_background_saves.py",),
    ),
    Fault(
        "series-removes-other-checkpoints",
        "fsdp2/checkpoint/_place.py",
        "keep_newest",
        "(one / SERIES).exists() and one != place",
        "one != place",
        "keep_last removes checkpoints in the same folder that were saved without it.",
        near=("behaviour/test_background_saves.py",),
    ),
    Fault(
        "full-params-keeps-last-tensor",
        "fsdp2/_core/transfer/summon.py",
        "_iterate",
        """
        if result is not None:
            yield names[index], result
        del result
        """,
        """
        if result is not None:
            yield names[index], result
        """,
        "The iterator keeps the tensor that it yielded last while the next bucket is gathered: the peak is a whole parameter above max_bytes, and a weak reference to it stays alive.",
        near=("behaviour/test_full_params.py",),
    ),
    Fault(
        "fused-counter-given-to-first-run-only",
        "fsdp2/optim/_local.py",
        "FusedAdam.settle",
        """
        for run in self._runs:
            ...
        """,
        """
        for run in self._runs[:1]:
            ...
        """,
        "After fused Adam steps the state of every run but the first says the old `step`: state dicts hold wrong counters, and later steps correct the bias wrongly.",
        near=("behaviour/test_optim.py",),
    ),
    Fault(
        "placed-user-gradient-not-kept",
        "fsdp2/_core/params/gradients.py",
        "add_to",
        "param.grad = existing",
        "",
        "A gradient that the user had put on a sharded parameter with other placements (or whole) is redistributed and added to, but the sum is thrown away: param.grad is still what the user put there.",
        near=(
            "behaviour/test_any_parameter.py",
            "behaviour/test_autograd.py",
            "behaviour/test_accumulation.py",
        ),
    ),
    Fault(
        "together-forgets-kind-of-error",
        "fsdp2/_core/comm/process_mesh.py",
        "Grid.raise_together",
        "_KINDS[told.kind](told.code, told.text)",
        "StateError(told.code, told.text)",
        "A ConfigError or UnsupportedError that one rank met is raised as a StateError: 'except ConfigError' does not catch it any more.",
        near=(
            "behaviour/test_divergence.py",
            "behaviour/test_errors.py",
            "unit/test_errors.py",
            "behaviour/test_checkpoint_api.py",
        ),
    ),
    Fault(
        "own-rows-of-rank-zero",
        "fsdp2/_core/params/group.py",
        "ParamGroup.shard",
        "own_rows(param, param.sharded, self.data.shard.rank)",
        "own_rows(param, param.sharded, 0)",
        "fully_shard copies the first rank's rows on every rank: full parameters are the first chunk repeated, and uneven parameters raise.",
        near=("unit/test_group.py", "behaviour/test_parity.py"),
    ),
    Fault(
        "zero-grad-forgets-half-reduced",
        "fsdp2/_core/api/module.py",
        "_zero_grad",
        "unreduced.is_waiting or unreduced.is_owed or group.reducer in may_hold",
        "unreduced.is_owed or group.reducer in may_hold",
        "HSDP: gradients of a backward under set_requires_all_reduce(False) survive model.zero_grad() and are added to those of the next backward that all-reduces.",
        near=("behaviour/test_accumulation.py",),
    ),
    Fault(
        "differentiated-once-a-backward",
        "fsdp2/_core/engine/step.py",
        "Call.pre_backward",
        "visit.opened_in == number or (visit.closed_in == number and visit.was_passed())",
        "visit.opened_in == number or visit.closed_in == number",
        "A hook that differentiates one forward again and again (an implicit layer) reads freed parameters the second time.",
        near=("behaviour/test_differentiated_again.py",),
    ),
    Fault(
        "updated-input-loses-its-mark",
        "fsdp2/_core/engine/step.py",
        "Call.follow_updates",
        "view.grad_fn is not node",
        "False",
        "A gradient penalty through a unit that updates its input in place: backward leaves the unit where nothing marks it.",
        near=("behaviour/test_differentiated_again.py", "behaviour/test_rank_differences.py"),
    ),
    Fault(
        "penalty-comes-in-unmarked",
        "fsdp2/_core/engine/step.py",
        "Call._follow_gradients",
        "inner.register_hook(self.mark_gradients)",
        "inner.metadata",
        "A gradient penalty: the second backward reads parameters that the first one gave back.",
        near=("behaviour/test_differentiated_again.py",),
    ),
    Fault(
        "waiting-gradients-untold",
        "fsdp2/_core/params/optimizer_steps.py",
        "_tell_of_unreduced",
        "waiting.append(reducer.ids.fqn or '<root>')",
        "waiting.copy()",
        "Two roots, a backward without sync through both, one with sync through the first: an optimizer steps without the other's gradients, in silence.",
        near=("behaviour/test_surprises.py",),
    ),
    Fault(
        "whole-parameters-serve-any-forward",
        "fsdp2/_core/params/group.py",
        "ParamGroup.inspect",
        "not watch.serves_this_forward or watch.were_written",
        "watch.were_written",
        "A forward without a backward, p.data.mul_(2), another forward: the root computes with the old values.",
        near=("behaviour/test_surprises.py",),
    ),
    Fault(
        "writes-of-a-forward-lost",
        "fsdp2/_core/params/planning.py",
        "Buffers.write_back",
        "shard.copy_(rows)",
        "shard.copy_(shard)",
        "A forward that clamps its weight, or an embedding with max_norm: the write is gone when the unit is resharded.",
        near=("behaviour/test_surprises.py",),
    ),
    Fault(
        "backward-prefetch-record-inverted",
        "fsdp2/_core/engine/tree.py",
        "Runtime.end_call",
        "visit.previous = self.prefetches.follow(unit)",
        "self.prefetches.follow(unit)",
        "A plain backward prefetches nothing, because no call knows the one before it: the events `backward: prefetch` are gone, and each all-gather is exposed.",
        near=("unit/test_order.py",),
    ),
    Fault(
        "base-of-output-view-unmarked",
        "fsdp2/_core/engine/step.py",
        "Call._mark",
        "(tensor,) if base is None else (tensor, base)",
        "(tensor,)",
        "If a unit returns a view and the caller updates it in place (x.mul_(2)), pre-backward never runs: backward meets freed parameters and fails, or the unit is not gathered.",
        near=("behaviour/test_autograd.py",),
    ),
    Fault(
        "idle-does-not-recover",
        "fsdp2/_core/engine/between_steps.py",
        "require_idle",
        "runtime.recover_if_failed()",
        "",
        "After a backward that raised, full_params, the checkpoint functions and summon_full_params say that they were called inside a backward, instead of recovering.",
        near=("behaviour/test_recovery.py",),
    ),
    Fault(
        "ignored-modules-without-their-children",
        "fsdp2/_core/api/collect.py",
        "Ignored.of",
        "{child for module in modules for child in module.modules()}",
        "set(modules)",
        "ignored_states=[module]: a parameter of a submodule of it that is tied to a module outside is sharded all the same, and an already sharded submodule in it raises no ConfigError.",
        near=("behaviour/test_ties.py",),
    ),
    Fault(
        "inspect-names-of-shared-module-lost",
        "fsdp2/_core/api/inspect.py",
        "_names_below",
        "model.named_modules(remove_duplicate=False)",
        "model.named_modules()",
        "fsdp2.units() gives a parameter of a module that is registered under two names only the first one.",
        near=("behaviour/test_conveniences.py", "behaviour/test_control_surface.py"),
    ),
    Fault(
        "layout-no-room-for-other-axis",
        "fsdp2/_core/params/layout.py",
        "GatherLayout.plan",
        "(size, *full_sizes)",
        "(size,)",
        "With an int for reshard_after_forward and rows that do not divide evenly, the layouts of the two axes put the unsharded parameters at different offsets of the one full buffer: backward gathers to the wrong places, or fails.",
        near=("unit/test_layout.py",),
    ),
    Fault(
        "layout-transposed-taken-for-row-major",
        "fsdp2/_core/params/layout.py",
        "ShardLayout.is_rank_major",
        "self.is_even and self.dim == 0 and self.stride == contiguous_stride(self.shape)",
        "self.is_even and self.dim == 0",
        "A parameter that is not contiguous (a transposed weight, channels_last) is gathered as if it were row-major: its unsharded values are in wrong places, the output is wrong.",
        near=("unit/test_layout.py",),
    ),
    Fault(
        "materialize-parents-first",
        "fsdp2/_core/base/names.py",
        "children_first",
        """
        for child_name, child in module.named_children():
            ...
        yield name, module
        """,
        """
        yield name, module
        for child_name, child in module.named_children():
            ...
        """,
        "materialize initialises parents before their children: a module with parameters of its own and children gets other random values than one process from the same seed.",
        near=("behaviour/test_materialize.py",),
    ),
    Fault(
        "materialize-unfreezes",
        "fsdp2/_core/transfer/materialize.py",
        "_like",
        "nn.Parameter(tensor, requires_grad=old.requires_grad)",
        "nn.Parameter(tensor, requires_grad=tensor.is_floating_point())",
        "Parameters that were frozen on meta require gradients after materialize, and are trained.",
        near=("behaviour/test_materialize.py",),
    ),
    Fault(
        "budget-ignores-reduce-dtype",
        "fsdp2/_core/engine/memory_budget.py",
        "Sizes.of",
        "numel * param.accumulated_dtype.itemsize",
        "numel * param.compute_dtype.itemsize",
        "With bf16 parameters and an fp32 reduce dtype the inputs of reductions are counted half: set_memory(bytes) accepts budgets that are too small, and picks more overlap than fits.",
        near=("behaviour/test_memory.py",),
    ),
    Fault(
        "mesh-roles-of-2d-swapped",
        "fsdp2/_core/comm/mesh.py",
        "DataMesh.of",
        "(REPLICATE, SHARD)",
        "(SHARD, REPLICATE)",
        "A 2-D mesh is read as (shard, replicate): placements and local shapes are swapped, and parameters are sharded over the wrong ranks.",
        near=("unit/test_mesh.py",),
    ),
    Fault(
        "forward-interrupt-not-noticed",
        "fsdp2/_core/engine/step.py",
        "_call_eagerly",
        """
        try:
            ...
        except BaseException as error:
            ...
        """,
        """
        try:
            ...
        except Exception as error:
            ...
        """,
        "After a KeyboardInterrupt in a forward the runtime stays in the forward phase: parameters stay whole, and the next forward neither begins nor recovers.",
        near=("behaviour/test_recovery.py",),
    ),
    Fault(
        "no-sync-exit-forces-sync-on",
        "fsdp2/_core/api/settings.py",
        "no_sync",
        "unit.configure(reduce_grads=settings.reduce_grads, all_reduce_grads=settings.all_reduce_grads)",
        "unit.configure(reduce_grads=True, all_reduce_grads=True)",
        "Leaving no_sync switches sync on even if it was off before: after an inner context the outer one reduces, and set_requires_gradient_sync(False) or set_requires_all_reduce(False) is forgotten.",
        near=("behaviour/test_accumulation.py",),
    ),
    Fault(
        "load-named-keeps-own-options",
        "fsdp2/checkpoint/_optimizer_state.py",
        "matched_groups",
        '{**kept, **(options[0] if options else {}), "params": ids}',
        '{**(options[0] if options else {}), **kept, "params": ids}',
        "Loading an optimizer's state leaves the options of its param groups (lr, betas, weight decay) as they were in the new optimizer, instead of those that were saved.",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "replicated-gradient-of-first-rank",
        "fsdp2/_core/params/packing.py",
        "sum_of_slots",
        "slots.sum(0).view(shard.shape)",
        "slots[0].view(shard.shape)",
        "A scalar or Replicate() parameter gets the first rank's part of its gradient only; the other ranks' parts are lost.",
        near=("unit/test_packing.py",),
    ),
    Fault(
        "uneven-tail-unpacked-by-columns",
        "fsdp2/_core/params/packing.py",
        "_unpadded",
        """
        numel = part[0].numel()  # one rank's, which begin where the padded shard does
        return padded.reshape(1, -1)[:, :numel].view(part.shape)
        """,
        """
        for dim in range(1, part.dim()):
            padded = padded.narrow(dim, 0, part.shape[dim])
        return padded
        """,
        "A parameter sharded on dim 1 (or higher) whose size the ranks do not divide has wrong values in the last rank's columns after the all-gather.",
        near=("unit/test_packing.py",),
    ),
    Fault(
        "users-parameter-hooks-not-moved",
        "fsdp2/_core/params/param.py",
        "FSDPParam.set_shard",
        "self._parameter(made, self.sharded)",
        "self._parameter(made, None)",
        "Hooks that the user registered on a parameter before fully_shard (register_hook, register_post_accumulate_grad_hook) are silently never called.",
        near=("behaviour/test_any_parameter.py",),
    ),
    Fault(
        "part-of-one-parameter-never-late",
        "fsdp2/_core/engine/parts.py",
        "Part.facts",
        "self._present > 0",
        "self._present > 1",
        "The gradient of a part with one parameter (an embedding, a head) that comes after the part was reduced early, because backward took another way, is missing in that step.",
        near=("behaviour/test_memory.py",),
    ),
    Fault(
        "pipeline-lone-lost-gradient-passes",
        "fsdp2/_core/engine/between_steps.py",
        "finish",
        """
        if lost:
            ...
        """,
        """
        if len(lost) > 1:
            ...
        """,
        "A pipeline stage in which exactly one unit lost its gradient raises no StateError, and that unit is silently not trained.",
        near=("behaviour/test_pipelining.py",),
    ),
    Fault(
        "post-forward-placement-always-rows",
        "fsdp2/_core/params/placement.py",
        "shrink",
        "Shard(old.dim)",
        "Shard(0)",
        "With an int for reshard_after_forward, a parameter sharded on dim 1 says Shard(0) between forward and backward: its placements, and full_tensor() of it, are wrong.",
        near=("behaviour/test_placement.py", "unit/test_placement.py"),
    ),
    Fault(
        "mesh-dims-overlap-accepted",
        "fsdp2/_core/base/policy.py",
        "DataParallelMeshDims.__post_init__",
        """
        both = set(self.shard_names) & set(self.replicate_names)
        if both:
            ...
        """,
        """
        both = set(self.shard_names) & set(self.replicate_names)
        if both and self.shard == self.replicate:
            ...
        """,
        "DataParallelMeshDims(shard=('a', 'b'), replicate='b') is taken without an error.",
        near=("behaviour/test_mesh_dims.py",),
    ),
    Fault(
        "cast-buffer-gives-stale-original",
        "fsdp2/_core/engine/precision.py",
        "CastBuffer.original",
        "self._is_unchanged()",
        "self._original is not None",
        "state_dict of a batch norm under buffer_dtype gives the running statistics from before training: what was written to the cast buffer is lost.",
        near=("behaviour/test_precision.py",),
    ),
    Fault(
        "first-gradient-not-taken-off",
        "fsdp2/_core/params/reduce.py",
        "Reducer._take_gradients",
        """
        for whole in wholes:
            if whole is not None:
                ...
        """,
        """
        for whole in wholes[1:]:
            if whole is not None:
                ...
        """,
        "The local gradient of the first trainable parameter of every group stays on the unsharded parameter after its reduction, so each later step reduces it again: wrong gradients from the second step on, and memory.",
        near=("unit/test_group.py", "unit/test_gradients.py"),
    ),
    Fault(
        "partial-reduction-added-again",
        "fsdp2/_core/params/reduce.py",
        "Reduction._sum_replicas",
        "owner.unreduced.partial = None",
        "",
        "On HSDP, gradients of a backward with set_requires_all_reduce(False) are added to the next reduction and then to every one after it, because what was kept of them is never dropped.",
        near=("behaviour/test_accumulation.py",),
    ),
    Fault(
        "scale-cached-over-settings",
        "fsdp2/_core/params/reduce.py",
        "Reducer.prepare",
        "plan is not None and planner.prepared[0] is plan and planner.prepared[1] is settings",
        "plan is not None and planner.prepared[0] is plan",
        "set_gradient_divide_factor (or a change to sums only) after the first backward has no effect: the scale of the first settings is used for ever.",
        near=("behaviour/test_control.py", "behaviour/test_collectives.py"),
    ),
    Fault(
        "runs-join-different-step-counters",
        "fsdp2/optim/_runs.py",
        "_signature",
        '(key, "counter", value.dtype, value.device, value.item())',
        '(key, "counter", value.dtype, value.device)',
        "Neighbours of which one had no gradient in some steps are stepped with one counter: Adam's bias correction and state_dict()'s step are wrong for all but the first.",
        near=("behaviour/test_optim.py",),
    ),
    Fault(
        "missed-events-not-made-up",
        "fsdp2/_core/engine/tree.py",
        "Order.missed",
        """
        if visit.left < 0:
            ...
        if self.is_first:
            ...
        else:
            ...
        """,
        """
        if visit.left < 0:
            ...
        if self.is_first and visit.marks_input:
            ...
        else:
            ...
        """,
        "A rank whose graph is cut gathers and reduces nothing for the unit that needs no gradient of its input there: ranks are out of step, a StateError on all.",
        near=("behaviour/test_rank_differences.py",),
    ),
    Fault(
        "first-units-left-too-early",
        "fsdp2/_core/engine/tree.py",
        "Order.rest",
        "at > first or visit.marks_input",
        "visit.left >= 0",
        "The root is resharded between the backwards of two forwards whose losses are summed, and gathered again: one all-gather of the root more for each further forward.",
        near=("unit/test_order.py", "behaviour/test_rank_differences.py"),
    ),
    Fault(
        "gather-by-hand-keeps-its-number",
        "fsdp2/_core/params/group.py",
        "ParamGroup.rewire",
        "self.state is GATHERING",
        "False",
        "unshard(async_op=True) before the first forward turns the check of the ranks' order off: a rank that goes another way hangs the others.",
        near=("behaviour/test_divergence.py",),
    ),
    Fault(
        "end-of-backward-reshard-inverted",
        "fsdp2/_core/engine/tree.py",
        "Runtime._reshard_after_backward",
        "not unit.settings.reshard_after_backward",
        "unit.settings.reshard_after_backward",
        "The root and the first block stay whole after backward: memory is not freed, parameters() are no DTensors, and the next forward may use values from before the optimizer step. With set_reshard_after_backward(False) they are freed instead.",
        near=("unit/test_order.py",),
    ),
    Fault(
        "failed-backward-leaves-gradients",
        "fsdp2/_core/engine/tree.py",
        "Runtime.recover",
        """
        for group in unit.groups:
            group.reducer.discard()
            group.registration.forget_stand_ins()
        """,
        """
        for group in unit.groups:
            group.registration.forget_stand_ins()
        """,
        "Unreduced gradients of a backward that raised (or that reset_iter_state() was to drop) are added to those of the next step.",
        near=("behaviour/test_recovery.py",),
    ),
    Fault(
        "half-reduced-gradients-never-flushed",
        "fsdp2/_core/engine/tree.py",
        "Runtime.end_reductions",
        "self._flush_partial()",
        "",
        "HSDP with set_requires_all_reduce(False): a unit that took no part in the last backward, which all-reduces, is not all-reduced over the replicate axis, and its grad is never set.",
        near=("behaviour/test_accumulation.py",),
    ),
    Fault(
        "index-of-several-files-stays",
        "fsdp2/checkpoint/_safetensors.py",
        "_Writer._publish",
        "self._replace_index({})",
        "",
        "Saving a model as one safetensors file where it lay in several leaves the old index, which names files that were removed: the checkpoint cannot be loaded any more.",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "schedule-record-never-renewed",
        "fsdp2/_core/engine/tree.py",
        "Schedule.end",
        "self._recorded[self._entry] = self._running",
        "self._recorded.setdefault(self._entry, self._running)",
        "The first forward's order is predicted for ever: once the order of units changes, there are no prefetches (or those of units that do not follow) in every later forward.",
        near=("unit/test_order.py", "unit/test_schedule.py"),
    ),
    Fault(
        "cast-inputs-of-first-gather-sent-again",
        "fsdp2/_core/params/buffers.py",
        "ShardBuffer._inputs_of",
        "self._views is not None and sent is self._views[1]",
        "self._views is not None",
        "With param_dtype=bf16, parameters of at least 128 KiB are gathered from the first step's cast copy for ever: forwards never see an optimizer step, and the copy stays in memory.",
        near=("behaviour/test_mixed_precision.py", "behaviour/test_copy_free.py"),
    ),
    Fault(
        "loaded-local-state-shares-memory",
        "fsdp2/checkpoint/_load.py",
        "_wrapped",
        "torch_dtensor.placed_like(like, value.clone())",
        "torch_dtensor.placed_like(like, value)",
        "After load_local_state the optimizer steps in the memory of the state that was loaded: going back to the same state a second time restores trained moments.",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "tie-needs-all-its-names",
        "fsdp2/checkpoint/_change.py",
        "compare",
        "n not in offered and id(tensor) not in given",
        "n not in offered",
        "Loading a state that has a tied parameter under one of its names only (as safetensors files have it) raises ConfigError about missing names.",
        near=("behaviour/test_checkpoint_api.py", "behaviour/test_state.py"),
    ),
    Fault(
        "scatter-skips-first-replicate-axis",
        "fsdp2/_core/transfer/redistribute.py",
        "_scatter_bucket",
        "enumerate(others)",
        "enumerate(others[1:], 1)",
        "What is loaded from rank 0 does not reach the ranks along an axis that does not cut the tensor: replicas of HSDP, and replicated parameters, get whatever the buffer held.",
        near=("behaviour/test_checkpoint_api.py", "behaviour/test_materialize.py"),
    ),
    Fault(
        "post-optim-event-not-waited-for",
        "fsdp2/_core/comm/wire.py",
        "Streams.order_after_event",
        "event.synchronize()",
        "return",
        "On a CPU the next forward gathers without waiting for the event that set_post_optim_event was given: an optimizer in another thread may not be done.",
        near=("behaviour/test_control_surface.py",),
    ),
    Fault(
        "summon-skips-ties-outside",
        "fsdp2/_core/transfer/summon.py",
        "_find",
        "sites[key] = list(owner.sites)",
        "sites[key] = sites[key] or list(owner.sites)",
        "summon_full_params of a submodule whose parameter is tied to one outside of it leaves the shard registered outside: inside the context the tie is broken.",
        near=("behaviour/test_summon.py",),
    ),
    Fault(
        "post-accumulate-hook-alone-unseen",
        "fsdp2/_core/params/reduce.py",
        "_have_hooks",
        """
        any(map(torch_autograd.gradient_hooks_of, params)) or any(
            map(torch_autograd.accumulate_hooks_of, params)
        )
        """,
        "any(map(torch_autograd.gradient_hooks_of, params))",
        "register_post_accumulate_grad_hook on sharded parameters is never called, unless some parameter of the group has a register_hook hook too (optimizer in backward does nothing).",
        near=("behaviour/test_autograd.py",),
    ),
    Fault(
        "version-counts-first-write-only",
        "fsdp2/_core/params/registration.py",
        "Registration._versions",
        "[optimizer_steps.count, *map(version_of, self._versioned)]",
        "[min(n, 1) for n in (optimizer_steps.count, *map(version_of, self._versioned))]",
        "Parameters that stay whole after a forward or a backward (reshard_after_backward off, a root after an evaluation) are not gathered again after the second optimizer step: later forwards compute with stale weights.",
        near=("behaviour/test_control.py", "behaviour/test_optim.py"),
    ),
    Fault(
        "compiled-gradients-pile-up",
        "fsdp2/_compiled/functional.py",
        "Delivery.__call__",
        "self._claim.settle(group.fqn)",
        "self._claim.give_back()",
        "Gradients that waited for a compiled step, and were reduced in its graph, wait again: each later step adds them once more.",
        near=("behaviour/test_traced.py",),
    ),
    Fault(
        "failed-traced-backward-stays-open",
        "fsdp2/_compiled/backward.py",
        "FunctionalBackward.begin",
        "EndOfBackward(end, end)",
        "EndOfBackward(end, lambda: None)",
        "After a backward of a compiled step that failed, weights that are read by name are gathered: on a rank alone that waits for the others.",
        near=("behaviour/test_traced_recomputed.py",),
    ),
    Fault(
        "traced-gather-in-the-mode-of-the-call",
        "fsdp2/_compiled/functional.py",
        "TracedUnit.call",
        "gathers and not torch.is_grad_enabled() and self._is_recorded",
        "gathers and not torch.is_grad_enabled() and not self._is_recorded",
        "In a compiled step a list of modules of which the first is called under no_grad, or recomputed by reentrant checkpointing, has no gradients for the others.",
        near=("behaviour/test_traced_recomputed.py",),
    ),
    Fault(
        "waits-sink-to-last-reduction",
        "fsdp2/_compiled/passes.py",
        "_ends",
        """
        behind = places[start] + limit * (1 + stages[node])
        if behind < len(found.reductions):
            ...
        """,
        """
        behind = len(found.reductions)
        if behind < len(found.reductions):
            ...
        """,
        "In a compiled backward every reduction is waited for only at the end, so the inputs of all reductions are held at a time: wrong order of nodes, and memory.",
        near=("behaviour/test_traced.py",),
    ),
    Fault(
        "traced-missing-gradient-unnoticed",
        "fsdp2/_compiled/ops.py",
        "reduce",
        "like.new_empty(0, dtype=plan.reduce_dtype) if None in grads else None",
        "like.new_empty(0, dtype=plan.reduce_dtype) if not grads else None",
        "In a compiled model a parameter that took no part in the loss gets a gradient of zeros instead of None, so weight decay and momentum move it.",
        near=("behaviour/test_traced.py",),
    ),
    Fault(
        "attributes-of-containers-not-visited",
        "fsdp2/_core/base/containers.py",
        "visit_tensors",
        '(*children, *getattr(value, "__dict__", {}).values())',
        'children or getattr(value, "__dict__", {}).values()',
        "An output that is a subclass of list or dict, or a dataclass, with a tensor in an attribute beside its items gets no mark there: a backward from it reads freed parameters.",
        near=("unit/test_containers.py",),
    ),
    Fault(
        "every-unit-stays-whole-after-forward",
        "fsdp2/_core/engine/tree.py",
        "Unit.keeps_after_forward",
        "choice is None and self.is_root and with_grad",
        "choice is None and with_grad",
        "On default settings all units, not the root alone, keep their whole parameters from forward to backward: no reshard events in forward, no gathers in backward, and the memory of the whole model.",
        near=("unit/test_order.py",),
    ),
    Fault(
        "load-full-ids-by-model-order",
        "fsdp2/checkpoint/_change.py",
        "optimizer_part",
        'rekey(dict(named), "name", model=model, optimizer=optimizer)',
        'rekey(dict(named), "name", model=model)',
        "load_full_state of an optimizer state under ids takes them in the order of model.parameters(): with param groups in another order, states go to wrong parameters (or an error about shapes).",
        near=("behaviour/test_checkpoint_api.py",),
    ),
    Fault(
        "order-check-hook-stays",
        "fsdp2/debug.py",
        "OrderCheck.__init__",
        "self._handles += [before, after]",
        "self._handles.append(after)",
        "After OrderCheck.remove() the hook before each unit stays: ranks go on comparing orders, with a collective before every unit, or warn of units out of turn.",
        near=("behaviour/test_comm_hooks.py",),
    ),
    Fault(
        "fused-step-does-not-bump-versions",
        "fsdp2/optim/_local.py",
        "LocalOptimizer.step",
        """
        if not self._step_fused(plans, groups, grads):
            self._step_with(plans, groups, grads)
        for plan in plans:
            increment_version(plan.written)
        """,
        """
        if not self._step_fused(plans, groups, grads):
            self._step_with(plans, groups, grads)
            for plan in plans:
                increment_version(plan.written)
        """,
        "After a step of fused Adam(W) the shards' versions are as before: units that stay whole (set_reshard_after_backward(False)) run the next forward with the old values.",
        near=("behaviour/test_optim.py", "behaviour/test_control.py"),
    ),
    Fault(
        "wrap-recursive-counts-wrapped-again",
        "fsdp2/wrap.py",
        "_recurse",
        "policy(module=module, recurse=False, nonwrapped_numel=numel - taken)",
        "policy(module=module, recurse=False, nonwrapped_numel=numel)",
        "A size-based policy also picks modules of which nearly all parameters are in units below them already: too many units.",
        near=("behaviour/test_wrap.py",),
    ),
    Fault(
        "ctrl-c-not-kept",
        "fsdp2/_core/base/interrupts.py",
        "kept_interrupts",
        "_plain.signal(signal.SIGINT, _keep)",
        "",
        "Ctrl-C between two collectives of a save leaves the other ranks in the second one, and the next operation meets theirs.",
        near=("behaviour/test_lost_ranks.py", "unit/test_interrupts.py"),
    ),
    Fault(
        "lent-views-dropped-at-release",
        "fsdp2/_core/params/reduce.py",
        "GradientBuffer.release",
        "self.is_released = True",
        """
        self._lent.clear()
        self._held = self._references()
        self.is_released = True
        """,
        "On a device fsdp2.optim.local no longer steps parameters whose gradients' memory was given back by a forward.",
        near=("behaviour/test_optim.py",),
    ),
    Fault(
        "late-gradient-of-part-lost",
        "fsdp2/_core/engine/parts.py",
        "Parts.tells_of_more",
        "part is not None and part.is_reduced and self._will_agree",
        "part is not None and part.is_reduced",
        "Where ranks do not exchange what they know of parts (on a device), gradients that come after a part's reduction are lost: the second backward through a retained graph.",
        near=("behaviour/test_memory.py",),
    ),
    Fault(
        "partial-sum-delivered",
        "fsdp2/_core/params/reduce.py",
        "Reduction.wait",
        """
        if self._grads is not None:
            self._deliver()
        """,
        "self._deliver()",
        "A backward without the sum over replicas raises a ValueError.",
        near=("behaviour/test_accumulation.py",),
    ),
]
