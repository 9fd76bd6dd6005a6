"""Transfer the weights of a sharded model to an inference engine.

``plan`` is called once. It determines which boxes of the parameters each engine rank needs
(``Box``, ``Spec``, ``tensor_parallel``), and which trainers send them. Each pair of ``Plan.send``
and ``Receiver.receive`` calls then transfers one version. No rank assembles a full parameter.
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
