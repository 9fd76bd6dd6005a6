"""Transfer the weights of a sharded model to an inference engine.

``plan`` determines, once, the boxes of the trainers' parameters that each engine rank needs
(``Box``, ``Spec``, ``tensor_parallel``), and the trainers that send them. ``Plan.send`` and
``Receiver.receive`` then transfer one version of the weights. No rank assembles a full parameter.
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
