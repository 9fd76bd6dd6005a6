"""The least that a step can send, by counting what must travel.

Legend: N ranks, P numel of the model, P_k numel kept unsharded between forward and backward (the
root's, unless its parts are groups of their own), b_p and b_r bytes an element of the compute
parameter and of the reduced gradient.
"""

from __future__ import annotations

from benchmarks.kit.models import Size


def sharded_bytes_sent(
    size: Size, ranks: int, b_p: int = 4, b_r: int = 4, *, split_root: bool = False
) -> float:
    """Return the bytes a rank sends in a step: (N-1)/N (b_p (2P - P_k) + b_r P)."""
    gathered = b_p * (2 * size.numel - (0 if split_root else size.root_numel))
    return (ranks - 1) / ranks * (gathered + b_r * size.numel)
