"""Marks of values are refused where a whole test would be marked: it would never be collected."""

from __future__ import annotations

import pytest

from tests.kit.slow import slow, with_slow


def test_a_test_is_no_value() -> None:
    with pytest.raises(TypeError, match="whole test"):
        slow(test_a_test_is_no_value)


def test_a_default_must_be_a_value() -> None:
    with pytest.raises(ValueError, match="none of"):
        with_slow([1, 2], default=[3])
