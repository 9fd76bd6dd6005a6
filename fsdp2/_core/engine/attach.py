"""Initialises a tree of units in the root's first forward. Does everything that requires the full
tree: names, the common runtime, owning units, and errors for invalid trees.
"""

from __future__ import annotations

import weakref

import torch.nn as nn

from fsdp2._core.base.errors import StateError
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.engine.between_steps import units_around
from fsdp2._core.engine.parts import Part, Parts
from fsdp2._core.engine.tree import Runtime, Unit, unit_of
from fsdp2._core.params.param import FSDPParam, check_unused

_told: weakref.WeakSet[Unit] = weakref.WeakSet()  # enclosing units for which FS304 was issued


def attach(root: Unit) -> Runtime:
    """Make ``root`` the root of all units below it. StateError: the tree is invalid, for example
    because a unit ran before the root, or no unit contains all uses of a tied parameter."""
    if root.fqn:  # set by ``fully_shard`` of an enclosing module
        _tell_of_outer(root)
    names: dict[Unit, str] = {}
    names_of_modules: dict[nn.Module, str] = {}
    on_meta: list[str] = []
    for top in root.modules:
        for name, module in top.named_modules():
            names_of_modules.setdefault(module, name)
            unit = unit_of(module)
            if unit is not None:
                names.setdefault(unit, name)
    for unit, name in names.items():
        if unit.runtime is not None:
            raise StateError(
                "FS304",
                f"{name or '<root>'}: ran a forward before {class_name(root.modules[0])}, which "
                "contains it, so it became a separate root. Run the outermost sharded module "
                "first.",
            )
        if unit is not root and unit.settings.manual_finalization:
            raise StateError(
                "FS303",
                f"{name}: set_manual_backward_finalization(True) was called on this module, which "
                "is not the root. Call it on the module whose forward you run.",
            )
        unit.take_names(names_of_modules)
        for group in unit.groups:
            for param in group.params:
                param.see_grad_dtype()
            check_unused(group.params, group.settings, group.policy)
            for param in group.params:
                _check_ties(param, unit)
                if param.is_on_meta:
                    on_meta.append(param.fqn)
    if on_meta:
        raise StateError(
            "FS208",
            f"{len(on_meta)} parameters are still on the meta device: {', '.join(on_meta)}. Before "
            "the first forward, call fsdp2.materialize(model, device), or call "
            "model.to_empty(device=...) and load a checkpoint.",
        )
    owned = _owning_units(root, names)
    runtime = Runtime(root, list(names))
    for unit, name in names.items():
        unit.runtime, unit.fqn = runtime, name
        unit.precision.choose_input_dtype(unit.is_root)
        if unit is not root and unit.post_optim_event is not None:
            root.post_optim_event, unit.post_optim_event = unit.post_optim_event, None
        for group in unit.groups:
            group.enroll(".".join(filter(None, (name, group.early.part))))
            group.context = runtime.context
    for owner, inner in owned.items():  # see [Note: conditional units] in ``tree``
        owner.groups = owner.own_groups + [group for unit in inner for group in unit.own_groups]
        for unit in inner:
            unit.owner, unit.groups = owner, []
    parts = [
        Part(group, unit)
        for unit in names
        for group in unit.own_groups
        if group.early.readers is not None and unit.owner is None
    ]
    if parts:
        runtime.parts = Parts(parts, runtime)
    return runtime


def _tell_of_outer(root: Unit) -> None:
    # a copy, which keeps the original's name, has no units around it
    outer = next((unit for unit in units_around(root) if not unit.fqn), None)
    if outer is None or outer in _told:
        return
    _told.add(outer)
    whole = class_name(outer.modules[0])
    warn(
        "FS304",
        f"{root.fqn}: ran a forward on its own before {whole}, which contains it and is also "
        f"sharded. It is now a separate root, and a forward of {whole} will raise an error. To use "
        f"{whole}, run it first; after that, its submodules can run on their own.",
    )


def _owning_units(root: Unit, names: dict[Unit, str]) -> dict[Unit, list[Unit]]:
    """Map each owning unit to its conditional units. See [Note: conditional units] in ``tree``.
    StateError: a conditional unit has no owning unit, or more than one."""
    above: dict[Unit, set[Unit | None]] = {}

    def walk(module: nn.Module, owner: Unit | None, inside: bool) -> None:
        unit = unit_of(module)
        if unit is not None:
            inside = inside or unit.conditional
            if inside:
                above.setdefault(unit, set()).add(owner)
            else:
                owner = unit
        for child in module.children():
            walk(child, owner, inside)

    for top in root.modules:
        walk(top, None, False)
    owned: dict[Unit, list[Unit]] = {}
    for unit in names:
        owners = above.get(unit, set())
        if len(owners) > 1 or None in owners:
            raise StateError(
                "FS223",
                f"{names[unit] or '<root>'}: is conditional, so exactly one enclosing unit that is "
                "not conditional must gather it. Apply fully_shard without conditional=True to one "
                "enclosing module, and run that module.",
            )
        for owner in owners:
            assert owner is not None
            owned.setdefault(owner, []).append(unit)
    return owned


def _check_ties(param: FSDPParam, unit: Unit) -> None:
    places = param.places
    if len(places) == 1:
        return
    own = {module for top in unit.modules for module in top.modules()}
    outside = [place for place in places if place not in own]
    if outside:
        raise StateError(
            "FS210",
            f"{param.fqn}: is shared with {class_name(outside[0])}, but no unit contains both "
            "modules. Apply fully_shard to a module that contains both, and run that module.",
        )
