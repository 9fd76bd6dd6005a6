"""Promise: an optimizer steps a sharded model as it steps the whole one, or raises an error.

`benchmarks.kit.optimizers` has the list and the comparison: five steps on a model of odd sizes (13,
29, one row) beside the whole model on the global batch, on the parameters of `fsdp2.fully_shard`,
under `fsdp2.optim.local`, and on those of torch's own. `tests.behaviour.test_optim` has what
`local` itself promises; `tests.ecosystem.test_client_optimizers` has other libraries' optimizers.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.kit.optimizers import ROWS, WAYS, Bf16AsDouble, Row, compare
from fsdp2.optim._local import ELEMENTWISE
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow

OF_TORCH = {row.label: row for row in ROWS if row.package == "torch.optim"}
LEFT_OUT = {"torch AdamW, capturable", "torch SparseAdam"}  # CPUs and dense gradients: no way does
ELEMENTWISE_ROWS = [
    label for label, row in OF_TORCH.items() if row.find() in ELEMENTWISE and label not in LEFT_OUT
]
OTHERS = [label for label in OF_TORCH if label not in (*ELEMENTWISE_ROWS, *LEFT_OUT)]


def test_every_class_of_torch_is_listed() -> None:
    """A new optimizer of torch's has to be looked at; this list says which were."""
    found = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert found - {row.cls for row in OF_TORCH.values()} == {"Optimizer"}


@pytest.mark.parametrize(
    "label",
    with_slow(
        ELEMENTWISE_ROWS,
        ["torch Rprop", "torch SGD, fused", "torch Adamax", "torch AdamW, a tensor as lr"],
    ),
)
@ranks(slow(2), 3)
def test_what_is_element_wise_trains_like_the_whole_model(label: str) -> None:
    """Under `local` always; on the `DTensor`s where torch has kernels, and else as torch's own."""
    row = OF_TORCH[label]
    outcomes = compare(row)
    local, ours, theirs = (outcomes[name] for name in ("fsdp2.optim.local", "fsdp2", "torch"))
    assert local.is_right(row), local
    assert outcomes["fsdp2.optim.whole"].is_right(row)
    assert ours.is_right(row) == theirs.is_right(row), (ours, theirs)
    assert ours.is_right(row) or ours.error == theirs.error, (ours, theirs)


@pytest.mark.parametrize("label", OTHERS)
@ranks(slow(2), 3)
def test_what_mixes_elements_is_right_or_an_error(label: str) -> None:
    """Adafactor, Muon and LBFGS: `local` refuses; on `DTensor`s they are right, or say they cannot.

    Both as torch's own: what it takes depends on its `DTensor` operators alone. Under `whole` the
    first two are the whole model's, and LBFGS, which looks at all parameters, is refused.
    """
    row = OF_TORCH[label]
    outcomes = compare(row)
    ours, theirs = outcomes["fsdp2"], outcomes["torch"]
    assert "ConfigError" in outcomes["fsdp2.optim.local"].error
    owned = outcomes["fsdp2.optim.whole"]
    assert ("FS711" in owned.error) if row.cls == "LBFGS" else owned.is_right(row), owned
    assert ours.is_right(row) or ours.error, ours
    assert (ours.error, ours.is_right(row)) == (theirs.error, theirs.is_right(row))


@ranks(slow(2), 3)
def test_muon_differs_by_its_own_rounding() -> None:
    """On sizes that the ranks divide Muon is the whole one's, once it does not compute in bf16."""
    row = OF_TORCH["torch Muon, even sizes"]
    exact = Row(row.package, row.cls, row.options, model=row.model, matrices_only=True)
    with Bf16AsDouble():
        outcomes = compare(exact, [way for way in WAYS if not way.is_local])
    for outcome in outcomes.values():
        assert outcome.is_right(exact), outcome


@ranks(2)
def test_sparse_gradients_are_made_dense() -> None:
    """An embedding with `sparse=True` gets dense gradients, which SparseAdam refuses by name."""
    outcomes = compare(OF_TORCH["torch SparseAdam"])
    assert "does not support dense gradients" in outcomes["fsdp2"].error
    assert "ConfigError" in outcomes["fsdp2.optim.local"].error
    assert outcomes["torch"].error  # of its own, in backward
