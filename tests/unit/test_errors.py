from __future__ import annotations

import pytest

from fsdp2._base.errors import ConfigError, ConfigTypeError, FSDPError, StateError, UnsupportedError

TREE = {ConfigError: ValueError, StateError: RuntimeError, UnsupportedError: NotImplementedError}


@pytest.mark.parametrize(("error", "builtin"), TREE.items(), ids=lambda e: e.__name__)
def test_an_error_is_ours_and_the_builtin_that_programs_catch(
    error: type[FSDPError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="what to do") as caught:
        raise error("FS101", "fqn: found this. Here is what to do.")
    assert isinstance(caught.value, FSDPError)


def test_a_wrong_type_is_a_type_error_too() -> None:
    """Programs that catch what torch's own functions raise catch it, and as a ConfigError."""
    for kind in (ConfigError, TypeError, ValueError, FSDPError):
        with pytest.raises(kind, match="found 1"):
            raise ConfigTypeError("FS101", "expected steps to be an int, found 1.5.")
    assert not issubclass(ConfigError, TypeError)


def test_the_classes_tell_callers_mistakes_apart() -> None:
    """UnsupportedError is a RuntimeError too, as NotImplementedError is; nothing else overlaps."""
    for error in TREE:
        assert [other for other in TREE if issubclass(error, other)] == [error]
        assert not issubclass(error, AssertionError)
    assert not issubclass(ConfigError, RuntimeError)
    assert not issubclass(StateError, ValueError)
