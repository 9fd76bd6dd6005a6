"""The error tree. Two families: the caller is wrong (below), or we are (``AssertionError``).

::

    FSDPError                       everything that this package raises on purpose
    ├── ConfigError(ValueError)     an argument or a model that cannot be sharded as asked
    │   └── ConfigTypeError(TypeError)   an argument of another type than is asked for
    ├── StateError(RuntimeError)    a call that is not legal now
    └── UnsupportedError(NotImplementedError)
                                    a thing that a user may expect and that does not exist here

A message has three parts: which parameter or module, what was found, what to do about it.
"""

from __future__ import annotations


class FSDPError(Exception):
    """Catch every deliberate error of this package with one class."""


class ConfigError(FSDPError, ValueError):
    """An argument, or a model, cannot be sharded as asked. Nothing was changed."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument is of another type than is asked for. Nothing was changed.

    Catch it as ``ConfigError``, or as the ``TypeError`` that it is in torch's own functions.
    """


class StateError(FSDPError, RuntimeError):
    """A call came at a moment when it is not legal. Nothing was changed."""


class UnsupportedError(FSDPError, NotImplementedError):
    """A request that is well defined but that this package does not do."""
