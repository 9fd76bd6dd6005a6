"""Which values of a `parametrize` the default suite takes, which the long matrix, which neither.

`slow` is the long matrix, which CI runs. `exhaustive` are those of it that CI leaves out for time:
they repeat others on more ranks or in more combinations (docs/testing.md has their last run).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return values of one test that is for the long matrix."""
    _refuse_tests(values)
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: Any) -> Any:
    """Return values of one test that is for the long matrix, and that CI leaves out."""
    _refuse_tests(values)
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.exhaustive))


def with_slow(
    everything: Iterable[Any], default: Iterable[Any] = (), ci: Iterable[Any] | None = None
) -> list[Any]:
    """Return all values for `parametrize`; those that are not in `default` are `slow`.

    With `ci`, those that are in neither are `exhaustive`.
    """
    values, first = list(everything), list(default)
    second = values if ci is None else list(ci)
    unknown = [value for value in (*first, *second) if value not in values]
    if unknown:
        raise ValueError(f"{unknown} are none of {values}")
    return [
        value
        if value in first
        else (slow if value in second else exhaustive)(
            *(value if isinstance(value, tuple) else (value,))
        )
        for value in values
    ]


def _refuse_tests(values: tuple[Any, ...]) -> None:
    """As a decorator these would replace the test by its values, and nobody would run it."""
    if any(getattr(value, "__name__", "").startswith("test_") for value in values):
        raise TypeError("these mark values; a whole test is marked with @pytest.mark.slow")
