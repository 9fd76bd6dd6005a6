"""Every combination of the values of several arguments, as one `parametrize`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.kit.slow import with_slow


def products(default: Iterable[Any] = (), **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise with each combination, by names; those that are not in `default` are slow."""
    return pytest.mark.parametrize(
        tuple(values), with_slow(itertools.product(*values.values()), default)
    )
