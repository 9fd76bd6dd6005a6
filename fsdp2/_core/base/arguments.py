"""Checks of one value that a caller passed, and the words for it in messages.

Owns what a count, a flag, a path, ... is. A check returns the value, or raises ``ConfigError``
(``ConfigTypeError`` if another type was expected) that names the function, the argument, what was
found and what is expected. It must not know what the value is used for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.errors import ConfigError, ConfigTypeError

SHOWN_CHARACTERS = 60


def described(value: object) -> str:
    """Return a few words for any value: never its whole text, which may be as large as a model."""
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
    who: str, name: str, expected: str, found: object, hint: str = ""
) -> ConfigTypeError:
    """Return the error for a value of another type."""
    return ConfigTypeError("FS101", _not_as_expected(who, name, expected, found, hint))


def wrong_value(who: str, name: str, expected: str, found: object, hint: str = "") -> ConfigError:
    """Return the error for a value of the right type that cannot be used."""
    return ConfigError("FS102", _not_as_expected(who, name, expected, found, hint))


def _not_as_expected(who: str, name: str, expected: str, found: object, hint: str) -> str:
    text = f"{who}: expected {name} to be {expected}, found {described(found)}."
    return f"{text} {hint}" if hint else text


def check_flag(who: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(who, name, "a bool", value)
    return value


def check_count(who: str, name: str, value: object, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(who, name, f"an int of at least {low}", value)
    if value < low:
        raise wrong_value(who, name, f"an int of at least {low}", value)
    return value


def check_number(
    who: str, name: str, value: object, expected: str = "a number", low: float = -math.inf
) -> float:
    """Take any number but nan from ``low`` on: also of numpy, or in a tensor of one element."""
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
    """Take what behaves as an optimizer (wrappers of other libraries do), or None."""
    needed = ("param_groups", "state", "state_dict", "load_state_dict")
    if value is None or isinstance(value, Optimizer):
        return value
    if isinstance(value, type) or not all(hasattr(value, name) for name in needed):
        raise wrong_type(who, "optimizer", "a torch.optim.Optimizer or None", value)
    return value


def check_function(who: str, name: str, value: object, expected: str = "a function or None") -> Any:
    """Take a function or None. A class or a module can be called too, and is hardly meant."""
    if value is not None and (not callable(value) or isinstance(value, type | nn.Module)):
        raise wrong_type(who, name, expected, value)
    return value


def check_mapping(who: str, name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(who, name, "a dict", value)
    return value


def check_dtype(who: str, name: str, value: object) -> torch.dtype | None:
    """Take a dtype of floating-point numbers, or None."""
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
    """Take a path that names something: the empty one would be the working directory."""
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
    """Take a device, or its name, on which this process can have tensors."""
    if not isinstance(value, torch.device | str):
        raise wrong_type(who, name, "a torch.device or the name of one", value)
    try:
        device = torch.device(value)
        is_real = device.type != "meta"
        if is_real:
            torch.empty(0, dtype=torch.uint8, device=device)
    except Exception as error:
        raise wrong_value(who, name, "a device of this machine", value, f"({error})") from error
    if not is_real:
        raise wrong_value(who, name, "a device with memory", value)
    return device


def check_device_type(who: str, name: str, value: object) -> str | None:
    """Take the name of a kind of device (``"cuda"``, not ``"cuda:0"``), or None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(who, name, 'the name of a kind of device, as "cuda", or None', value)
    if ":" in value:
        raise wrong_value(who, name, 'a kind of device, as "cuda", without a number', value)
    return check_device(who, name, value).type


def check_process_group(who: str, name: str, value: object) -> dist.ProcessGroup | None:
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise wrong_type(who, name, "a process group or None", value)
    return value


def translated(who: str, error: Exception) -> ConfigError:
    """Return an error of ours for what another library says about arguments passed on to it."""
    kind = ConfigTypeError if isinstance(error, TypeError) else ConfigError
    return kind("FS103", f"{who}: {type(error).__name__}: {error}")
