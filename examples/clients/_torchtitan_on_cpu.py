"""Let torchtitan run on CPUs: import this before any other part of torchtitan.

Two things are lifted:

- torchtitan takes its device from `torchtitan.tools.utils`, which knows accelerators only. Its
  memory monitor asks that device for a name, a capacity and statistics, which `torch.cpu` lacks.
- It sets every unit's gradient divide factor to 1. For this torch's own units ask for a sum with
  factors, which gloo has none of, unless they are told to use plain sums.
"""

import types

import torch
import torchtitan.tools.utils as utils

cpu = types.ModuleType("cpu")
cpu.__dict__.update(
    {name: getattr(torch.cpu, name) for name in ("set_device", "synchronize")},
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
utils.device_type, utils.device_module = "cpu", cpu

import torchtitan.distributed.fsdp as titan_fsdp  # noqa: E402  # it reads the device at import


def sum_without_factors(model: torch.nn.Module) -> None:
    divide_by_one(model)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


divide_by_one = titan_fsdp.disable_fsdp_gradient_division
titan_fsdp.disable_fsdp_gradient_division = sum_without_factors
