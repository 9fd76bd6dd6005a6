"""Which values of a `parametrize` are slow: for the pool, never for the default suite.

They take long, or repeat others on more ranks or in more combinations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return values of one test that is for the pool.

    Raises: TypeError for a test. As a decorator this would replace the test by its values, and
    nobody would run it.
    """
    if any(getattr(value, "__name__", "").startswith("test_") for value in values):
        raise TypeError("this marks values; a whole test is marked with @pytest.mark.slow")
    return pytest.param(*values, marks=pytest.mark.slow)


def with_slow(everything: Iterable[Any], default: Iterable[Any] = ()) -> list[Any]:
    """Return all values for `parametrize`; those that are not in `default` are `slow`.

    Raises: ValueError for a default that is no value.
    """
    values, quick = list(everything), list(default)
    unknown = [value for value in quick if value not in values]
    if unknown:
        raise ValueError(f"{unknown} are none of {values}")
    return [
        value if value in quick else slow(*(value if isinstance(value, tuple) else (value,)))
        for value in values
    ]
