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
    "FS313": Elsewhere(
        "no public call is known that leads there: the package checks itself",
        "tests/unit/test_param.py::test_moves",
    ),
    "FS626": Elsewhere(
        "it takes a mesh of 2 x 2 ranks in a job of more",
        "tests/behaviour/test_checkpoint_api.py::test_a_mesh_of_two_dims_that_is_not_the_whole_job",
    ),
    "FS803": Elsewhere(
        "only models on a GPU record CUDA graphs",
        "tests/behaviour/test_traced.py::test_cuda_graphs_are_refused",
    ),
}
