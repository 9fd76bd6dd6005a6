"""Promise: every family of models in `transformers` trains on ranks as it does unsharded.

Units are the modules that a family wants whole, inner ones first. CI draws a few families by the
commit's hash; `scripts/ecosystem` runs all of them, and `-m ecosystem` compiles them, too.
"""

from __future__ import annotations

import pytest

from tests.ecosystem._families import (
    FAMILIES,
    NOT_BUILT,
    REFUSED,
    UNTRIED,
    Family,
    batch_of,
    build,
    loss_of,
    step_compiled,
    train,
)
from tests.kit.pool import ranks, ranks_that_share
from tests.lab.ring import ring_order

pytestmark = pytest.mark.ecosystem

ROUGH = {"mobilevit": 2e-3}
"""Of families whose unsharded gradients in fp32 differ from those in fp64 by more than 1e-4."""

DRAWN = {"family": 6, "compiled_family": 2}
"""How many families CI draws for a test with an argument of this name."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test all families, or those that lie on the ring from the place of CI's commit on."""
    for name in DRAWN.keys() & set(metafunc.fixturenames):
        families = [str(family) for family in FAMILIES]
        commit = metafunc.config.getoption("draw")
        metafunc.parametrize(
            name, ring_order(families, commit)[: DRAWN[name]] if commit else families
        )


@ranks_that_share(2, limit_s=120)
def test_a_family_trains_like_the_unsharded_model(family: str) -> None:
    """Losses, gradients and parameters of two steps are the unsharded model's."""
    known = Family.parse(family)
    if known in REFUSED:
        with pytest.raises(REFUSED[known]):
            train(known, "fsdp2")
        return
    trained = train(known, "fsdp2")
    assert trained.difference < 1e-4, trained.where


@pytest.mark.slow
@ranks(2, limit_s=240)
def test_a_family_is_one_graph_if_the_unsharded_model_is(compiled_family: str) -> None:
    """`fsdp2.compile(fullgraph=True)` breaks only where the unsharded model breaks as well."""
    family = Family.parse(compiled_family)
    try:
        trained = train(family, "fsdp2", compiled=True)
    except Exception as found:
        with pytest.raises(type(found)):
            step_compiled(family)
    else:
        assert trained.difference < ROUGH.get(family.name, 1e-4), trained.where


@pytest.mark.parametrize("left_out", UNTRIED, ids=str)
def test_a_family_that_is_left_out_cannot_be_built_here(left_out: Family) -> None:
    """The list of what is left out has nothing that would work."""

    def forward() -> None:
        model = build(left_out)
        loss_of(model, batch_of(model, left_out, 1), 0)

    with pytest.raises(NOT_BUILT):
        forward()
