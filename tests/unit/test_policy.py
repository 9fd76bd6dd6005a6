from __future__ import annotations

import dataclasses

import pytest

from fsdp2._core.base.policy import MixedPrecisionPolicy, OffloadPolicy, Settings


def test_settings_are_replaced_as_a_whole() -> None:
    settings = Settings()
    changed = dataclasses.replace(settings, reduce_grads=False)
    assert settings.reduce_grads
    assert not changed.reduce_grads
    assert changed.all_reduce_grads


def test_a_misspelt_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="reduce_gradients"):
        dataclasses.replace(Settings(), reduce_gradients=False)


@pytest.mark.parametrize("value", [Settings(), MixedPrecisionPolicy(), OffloadPolicy()])
def test_what_users_choose_is_frozen_and_a_value(value: object) -> None:
    with pytest.raises(AttributeError):
        value.anything = 1  # type: ignore[attr-defined]  # the point of the test
    assert value == type(value)()
    assert hash(value) == hash(type(value)())
