"""The scenarios: what users do with sharded models, each on the simulated device.

Every scenario trains a few steps and returns its parameters. Steps from the fourth on are steady:
there the host may not wait for the device. The files are by subject; importing this package fills
the list.
"""

from tests.sim.scenarios import (
    activations,
    combined,
    comms,
    compiled,
    control,
    failures,
    graphs,
    memory,
    meshes,
    offload,
    optimizers,
    pipelines,
    precision,
    recomputation,
    recording,
    shapes,
    sharding,
    state,
    states,
    streams,
)

__all__ = [
    "activations",
    "combined",
    "comms",
    "compiled",
    "control",
    "failures",
    "graphs",
    "memory",
    "meshes",
    "offload",
    "optimizers",
    "pipelines",
    "precision",
    "recomputation",
    "recording",
    "shapes",
    "sharding",
    "state",
    "states",
    "streams",
]
