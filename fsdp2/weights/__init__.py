"""Transfer the weights of a sharded model to an inference engine.

``plan`` computes once which boxes of the trainers' parameters each engine rank needs (``Box``,
``Spec``, ``tensor_parallel``), and which trainers send them. ``Plan.send`` and ``Receiver.receive``
transfer one version; no rank assembles a full parameter. This module exports the public names.
"""

from fsdp2.weights._layout import Box, Cut, Spec, tensor_parallel
from fsdp2.weights._route import Figures
from fsdp2.weights._update import Plan, Receiver, SendHandle, plan
from fsdp2.weights._wire import Files

__all__ = [
    "Box",
    "Cut",
    "Figures",
    "Files",
    "Plan",
    "Receiver",
    "SendHandle",
    "Spec",
    "plan",
    "tensor_parallel",
]
