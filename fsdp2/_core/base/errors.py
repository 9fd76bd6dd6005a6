"""The exception hierarchy. User errors raise ``FSDPError``; bugs in fsdp2 raise ``AssertionError``.

::

    FSDPError                                   every deliberate error of this package
    ├── ConfigError(ValueError)                 an argument or a model that cannot be used
    │   └── ConfigTypeError(TypeError)          an argument of the wrong type
    ├── StateError(RuntimeError)                a call that is invalid at this time
    └── UnsupportedError(NotImplementedError)   a plausible request that is not implemented

A message has three parts: the parameter or module, the value found, and the remedy. Each message
ends with a code such as ``[FS104]``. The pages in ``fsdp2/_core/errors`` explain the codes.

[Note: a rank that is gone]
A killed or stopped rank cannot report an error; the next collective on other ranks fails with a
backend error. The context manager ``carrying``, which wraps collectives, converts the backend error
to a ``LostRank``. Callers add the parameter and the operation to this error with ``named``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer


def coded(code: str, text: str) -> str:
    """Return a message with its code appended, for warnings and errors of other classes."""
    return f"{text} [{code}]"


class FSDPError(Exception):
    """Base class of all errors that this package raises deliberately.

    ``code`` is a string such as ``"FS104"``, whose meaning stays the same in later versions. For
    an explanation of the code, see the manual or run ``python -m fsdp2 explain FS104``. ``text`` is
    the message without the code; ``str(error)`` contains both."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(coded(code, text))
        self.code = code
        self.text = text
        if sys.version_info >= (3, 11):  # shown below a traceback, not part of the message
            self.add_note(f"For details, run `python -m fsdp2 explain {code}`.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the arguments of ``__init__``, which differ from ``args``."""
        return type(self), (self.code, self.text), vars(self)


class ConfigError(FSDPError, ValueError):
    """An argument or a model cannot be used as requested. Nothing was changed.

    This is also a ``ValueError`` and, if an argument has the wrong type, a ``TypeError``."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type. Nothing was changed.

    Catch it as ``ConfigError``, or as ``TypeError``, the class that torch's own functions raise."""


class StateError(FSDPError, RuntimeError):
    """A call is invalid at this time, or the ranks disagree. Also a ``RuntimeError``.

    The documentation of each function says whether anything was changed."""


class UnsupportedError(FSDPError, NotImplementedError):
    """A valid request that is not supported or possible here. Also a ``NotImplementedError``."""


CLOSED = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|got 0 bytes|"
    r"remote process exited|ncclRemoteError|connection refused",
    re.IGNORECASE,
)
WAITED = re.compile(
    r"(?:timed out waiting|timeout after|timeout\(ms\)\s*=|timed out after)\s*(\d+)\s*(ms)?",
    re.IGNORECASE,
)


def known_of(cause: str) -> str:
    """Describe what a backend's error indicates about the missing rank, or return ""."""
    waited = WAITED.search(cause)
    if waited is not None:
        silence = f"no data arrived from it for {int(waited[1]) / 1000:g} s"
        return f"{silence}. It hangs, needs more time, or the link to it is down"
    if CLOSED.search(cause):
        return (
            "it closed the connection. Its program ended (did it have fewer batches?), it failed, "
            "or the link to it broke"
        )
    return ""


class LostRank(StateError):  # noqa: N818  # a StateError whose cause is another rank
    """A collective failed because of a missing rank. See [Note: a rank that is gone]."""

    def __init__(self, cause: str, where: tuple[str, ...] = ()) -> None:
        super().__init__("FS402", cause)
        self.cause = cause
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.cause, self.where), vars(self)

    def __str__(self) -> str:
        known = known_of(self.cause)
        what = f": {known}. If no rank has exited, a rank" if known else ". It has exited, or it"
        text = (
            f"{': '.join(self.where) or 'a collective'}: another rank did not take part{what} "
            "called a different operation: is this call under `if rank == 0:`? Check the output of "
            f"the other ranks, and restart all ranks. The backend reported: {self.cause}"
        )
        return coded(self.code, text)


@contextlib.contextmanager
def carrying() -> Iterator[None]:
    """Convert backend errors to LostRank; use this context only around collectives."""
    try:
        yield
    except FSDPError:
        raise
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        raise LostRank(cause or type(error).__name__) from error


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Prefix a LostRank's message with an operation. Use as a context manager or decorator."""
    try:
        yield
    except LostRank as error:
        if not (error.where and error.where[0].startswith(what)):
            error.where = (what, *error.where)
        raise


# Checks of single user-supplied values.

SHOWN_CHARACTERS = 60


def described(value: object) -> str:
    """Describe any value in a few words, because a ``repr`` (of a model, say) can be very long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 100:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | complex):
        return repr(value)
    if isinstance(value, str | bytes):
        text = repr(value[: SHOWN_CHARACTERS + 1])
        return text if len(value) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}{shape}"


def wrong_type(
    who: str,
    name: str,
    expected: str,
    found: object,
    hint: str = "",
) -> ConfigTypeError:
    return ConfigTypeError("FS101", wrong_value(who, name, expected, found, hint).text)


def wrong_value(
    who: str,
    name: str,
    expected: str,
    found: object,
    hint: str = "",
) -> ConfigError:
    text = f"{who}: expected {name} to be {expected}, found {described(found)}."
    return ConfigError("FS102", f"{text} {hint}" if hint else text)


def check_flag(who: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(who, name, "a bool", value)
    return value


def check_count(who: str, name: str, value: object, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(who, name, f"an int of at least {low}", value)
    if value < low:
        raise wrong_value(who, name, f"an int of at least {low}", value)
    if value >= 1 << 63:
        raise wrong_value(who, name, "an int below 2**63", value)
    return value


def check_number(
    who: str,
    name: str,
    value: object,
    expected: str = "a number",
    low: float = -math.inf,
) -> float:
    """Accept a number, NumPy scalar or one-element tensor that is at least ``low``; reject NaN."""
    if type(value) is float:
        number = value
    elif isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise wrong_type(who, name, expected, value)
    else:
        try:
            number = float(value)
        except Exception as error:
            raise wrong_type(who, name, expected, value) from error
    if not number >= low:
        raise wrong_value(who, name, expected, value)
    return number


def check_module(who: str, name: str, value: object) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise wrong_type(who, name, "an nn.Module", value, "Pass the module itself.")
    return value


def check_optimizer(who: str, value: object) -> Any:
    """Accept an optimizer, a third-party wrapper with the same interface, or None."""
    needed = ("param_groups", "state", "state_dict", "load_state_dict")
    if value is None or isinstance(value, Optimizer):
        return value
    if isinstance(value, type) or not all(hasattr(value, name) for name in needed):
        raise wrong_type(who, "optimizer", "a torch.optim.Optimizer or None", value)
    return value


def check_function(
    who: str,
    name: str,
    value: object,
    expected: str = "a function or None",
) -> Any:
    """Accept a function or None. Reject classes and modules (callable, but probably mistakes)."""
    if value is not None and (not callable(value) or isinstance(value, type | nn.Module)):
        raise wrong_type(who, name, expected, value)
    return value


def check_mapping(who: str, name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(who, name, "a dict", value)
    return value


def check_dtype(who: str, name: str, value: object) -> torch.dtype | None:
    if value is not None and not isinstance(value, torch.dtype):
        raise wrong_type(who, name, "a floating-point dtype or None", value)
    if value is not None and not value.is_floating_point:
        raise wrong_value(who, name, "a floating-point dtype or None", value)
    return value


def check_key(who: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(who, name, "a str", value)
    return value


def check_path(who: str, name: str, value: object) -> str:
    """Accept a path. Reject an empty path, which would mean the working directory."""
    path: object = None
    if isinstance(value, str | os.PathLike):
        try:
            path = os.fspath(value)
        except Exception as error:
            raise wrong_type(who, name, "a path", value) from error
    if not isinstance(path, str):
        raise wrong_type(who, name, "a str or an os.PathLike of str", value)
    if not path or "\0" in path:
        raise wrong_value(who, name, "a path", value)
    return path


def check_device(who: str, name: str, value: object) -> torch.device:
    """Accept a device or its name, if this process can allocate tensors on it."""
    if not isinstance(value, torch.device | str):
        raise wrong_type(who, name, "a torch.device or the name of one", value)
    try:
        device = torch.device(value)
        if device.type != "meta":
            torch.empty(0, dtype=torch.uint8, device=device)
    except Exception as error:
        raise wrong_value(who, name, "a device of this machine", value, f"({error})") from error
    if device.type == "meta":
        raise wrong_value(who, name, "a device with memory", value)
    return device


def check_device_type(who: str, name: str, value: object) -> str | None:
    """Accept the name of a device type (``"cuda"``, not ``"cuda:0"``), or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(who, name, 'a device type such as "cuda", or None', value)
    if ":" in value:
        raise wrong_value(who, name, 'a device type such as "cuda", without an index', value)
    return check_device(who, name, value).type


def check_process_group(who: str, name: str, value: object) -> dist.ProcessGroup | None:
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise wrong_type(who, name, "a process group or None", value)
    return value


def translated(who: str, error: Exception) -> ConfigError:
    """Convert an error that another library raised for arguments that we passed to it."""
    kind = ConfigTypeError if isinstance(error, TypeError) else ConfigError
    return kind("FS103", f"{who}: {type(error).__name__}: {error}")
