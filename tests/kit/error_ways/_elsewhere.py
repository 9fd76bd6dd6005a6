"""Codes without a way: why, and which test raises each of them."""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """``test``: a file and a function."""

    why: str
    test: str


ELSEWHERE = {
    "FS218": Elsewhere(
        "the program must have no process group, and ranks have one",
        "tests/behaviour/test_error_paragraphs.py::test_no_process_group",
    ),
    "FS233": Elsewhere(
        "only torch 2.11 leads there",
        "tests/behaviour/test_owned_shards.py::test_a_torch_that_asks_no_subclass_is_told",
    ),
    "FS313": Elsewhere(
        "no public call is known that leads there: the package checks itself",
        "tests/unit/test_param.py::test_moves",
    ),
    "FS324": Elsewhere(
        "on a CPU nothing is copied to the host",
        "tests/sim/test_activations.py::test_activations",
    ),
    "FS328": Elsewhere(
        "a CPU captures no step",
        "tests/sim/test_graphs.py::test_a_step_is_captured_a_few_times_and_then_stays_eager",
    ),
    "FS718": Elsewhere(
        "a CPU captures no step, which is said first",
        "tests/sim/test_graphs.py::test_what_is_refused",
    ),
    "FS803": Elsewhere(
        "only models on a GPU record CUDA graphs",
        "tests/behaviour/test_traced.py::test_cuda_graphs_are_refused",
    ),
}
