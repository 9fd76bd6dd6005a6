"""The error tree. Two families: the caller is wrong (below), or we are (``AssertionError``).

::

    FSDPError                       everything that this package raises on purpose
    ├── ConfigError(ValueError)     an argument or a model that cannot be sharded as asked
    │   └── ConfigTypeError(TypeError)   an argument of another type than is asked for
    ├── StateError(RuntimeError)    a call that is not legal now
    └── UnsupportedError(NotImplementedError)
                                    a thing that a user may expect and that does not exist here

A message has three parts: which parameter or module, what was found, what to do about it. It ends
with a code, as ``[FS104]``: a heading in ``fsdp2/_core/errors``, which says more than a message
can.
"""

from __future__ import annotations

import sys
from typing import Any


def coded(code: str, text: str) -> str:
    """Return a message that ends with its code; for what is no ``FSDPError``, as a warning."""
    return f"{text} [{code}]"


class FSDPError(Exception):
    """Catch every deliberate error of this package with one class.

    ``code`` is a word such as ``"FS104"``, which keeps its meaning in later versions.
    ``python -m fsdp2 explain FS104`` explains it, and so does the manual. ``text`` is the message
    without the code; ``str(error)`` has both.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(coded(code, text))
        self.code = code
        self.text = text
        if sys.version_info >= (3, 11):  # shown below a traceback, and no part of the message
            self.add_note(f"`python -m fsdp2 explain {code}` says more.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by what ``__init__`` takes, which is not ``args``."""
        return type(self), (self.code, self.text), vars(self)


class ConfigError(FSDPError, ValueError):
    """An argument or a model cannot be used as asked. Nothing was changed. Also a ``ValueError``.

    An argument of a wrong type is a ``TypeError`` besides.
    """


class ConfigTypeError(ConfigError, TypeError):
    """An argument is of another type than is asked for. Nothing was changed.

    Catch it as ``ConfigError``, or as the ``TypeError`` that it is in torch's own functions.
    """


class StateError(FSDPError, RuntimeError):
    """A call came at the wrong moment, or the ranks do not agree. Also a ``RuntimeError``.

    The documentation of each function says whether something was changed.
    """


class UnsupportedError(FSDPError, NotImplementedError):
    """A request is well defined, but cannot be met here. Also a ``NotImplementedError``."""
