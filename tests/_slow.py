"""Which values of a `parametrize` the default suite takes, which the long matrix, which neither.

`slow` is the long matrix, which CI runs. `exhaustive` are those of it that CI leaves out for time:
they repeat others on more ranks or in more combinations (docs/testing.md has their last run).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return values of one test that is for the long matrix."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: Any) -> Any:
    """Return values of one test that is for the long matrix, and that CI leaves out."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.exhaustive))


def with_slow(everything: Iterable[Any], default: Container[Any]) -> list[Any]:
    """Return all values for `parametrize`; those that are not in `default` are `slow`."""
    return [
        value if value in default else slow(*value if isinstance(value, tuple) else (value,))
        for value in everything
    ]
