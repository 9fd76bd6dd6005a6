"""An interpreter that runs untrusted pickles and checks each instruction.

Implements the instructions that Python 3 and torch write, with limits on each. A pickle may use
names of plain data, names that the user allows and, with ``trust``, all names.

[Note: objects that a pickle may call and modify]
A pickle is a program. Here it may call only objects from a table of names, and modify only objects
that it created. These are lists, dicts and sets from its own instructions, placeholders, and
instances that its calls returned, if no other code references them. Whatever the table contains, a
pickle cannot modify an existing object of this process.

[Note: bounds]
No instruction uses more memory than the size of the pickle. ``pickletools``, which reads the
arguments, reads at most the remaining bytes, whatever length is declared. The memo is a dict, so
a large index takes no memory. The arguments of a call, including containers, and the state of an
object are copied. Each copied element is charged against a budget, about the size of the pickle in
bytes, because a memo reference can repeat a long container in two bytes. A key is hashed completely
on each use, so a tuple key may have at most a thousand elements, and an int key at most a thousand
64-bit words.

[Note: names that a pickle may use]
A name outside the table is refused, unless the caller trusts the pickle. The table entry of a class
is a function, created for one unpickling, that accepts only the arguments found in pickles of plain
data. The table also contains the names that the user allowed with
``torch.serialization.add_safe_globals``. It does not contain the names that torch itself allows,
because, for example, unpickling a ``DeviceMesh`` creates process groups.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import IO, Any

import torch

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable

DICTS = (dict, OrderedDict, Counter, defaultdict)
LISTS = (list, deque)
STATEFUL = (OrderedDict, Counter)  # types that may have attributes, as torch's state dicts do
# Types from which a container may be created; not range, because a few bytes encode a huge range.
ELEMENTS = (str, bytes, bytearray, tuple, list, set, frozenset, *DICTS, deque)
KEY_NELEMENTS = 1000  # elements of a tuple key, or words of an int key: see [Note: bounds]
# Python 2 names, which protocol 2 (written by torch) uses.
OLD_MODULES = {"__builtin__": "builtins"}
OLD_NAMES = {("builtins", "xrange"): "range", ("builtins", "long"): "int"}


class RefusedError(UnpicklingError):
    """Raised if a pickle uses a name outside the table or modifies an object it did not create."""


class Placeholder:
    """Contains the pickled data of an object, without the behaviour of the object's class."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.args = state


@dataclass(frozen=True)
class Allowed:
    """A table entry allowed by the user: the real function or class."""

    value: Any


class Machine:
    """Runs one pickle. ``names`` maps (module, name) to an object created for this run, a constant,
    or an ``Allowed``. ``persistent`` resolves persistent ids."""

    def __init__(
        self, data: bytes, names: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any]
    ) -> None:
        self._data = data
        self._names = names
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # stacks below marks
        self._memo: dict[int, Any] = {}
        self._callable: dict[int, Any] = {}  # objects fetched from ``names``, by id
        self._own: dict[int, Any] = {}  # new instances, returned by calls to allowed names
        self._foreign: dict[int, Any] = {}  # results of such calls that other code references
        self._left = len(data) + 1000  # see [Note: bounds]

    def run(self) -> Any:
        """Return the object. Raise RefusedError, or UnpicklingError if the pickle is damaged."""
        file = io.BytesIO(self._data)
        try:
            while (code := file.read(1)) != pickle.STOP:
                step, read_argument = CODES.get(code, (_unknown, None))
                step(self, None if read_argument is None else read_argument(file))
            return self._stack.pop()
        except (RefusedError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle may underflow a stack, for example
            what = "" if isinstance(error, UnpicklingError) else f"{type(error).__name__}: "
            raise UnpicklingError(
                f"its pickle is damaged at byte {file.tell()}: {what}{error}"
            ) from error

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._outer.pop()
        return found

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()

    def _tuple(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise UnpicklingError("the stack is empty")
        stack[-count:] = [tuple(stack[-count:])]

    def _append(self, values: list[Any]) -> None:
        self._target(LISTS).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target, keys = self._target(DICTS), values[::2]
        require_keys(keys)
        for key, value in zip(keys, values[1::2], strict=True):
            target[key] = value

    def _add_items(self, values: list[Any]) -> None:
        target = self._target((set,))
        require_keys(values)
        target.update(values)

    def _target(self, kinds: tuple[type, ...]) -> Any:
        """Return the object to modify: a container or an instance that this pickle created."""
        target = self._stack[-1]
        key = id(target)
        is_own = key not in self._foreign if type(target) in kinds else key in self._own
        if not is_own:
            raise self._not_own(target)
        return target

    def _not_own(self, target: Any) -> UnpicklingError:
        what = target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"
        if id(target) in self._foreign or id(target) in self._callable:
            return RefusedError(f"to modify {what} that other code uses")
        return UnpicklingError(f"{what} cannot be modified")

    # Names and calls. See [Note: objects that a pickle may call and modify].

    def _fetch(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise UnpicklingError("a name is not a string")
        module = OLD_MODULES.get(module, module)
        name = OLD_NAMES.get((module, name), name)
        if (module, name) not in self._names:
            raise RefusedError(printable(f"{module}.{name}"))
        found = self._names[module, name]
        value = found.value if isinstance(found, Allowed) else found
        self._callable[id(value)] = found
        if value is not found:
            self._foreign[id(value)] = value
        self._stack.append(value)

    def _called(self, *, is_class: bool, has_names: bool = False) -> Any:
        named = self._stack.pop() if has_names else {}
        args, function = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple or type(named) is not dict:
            raise UnpicklingError("arguments are not a tuple")
        self._pay(args)
        found = self._callable.get(id(function))
        if found is None:
            raise UnpicklingError(f"a {type(function).__name__} is called")
        if isinstance(found, Allowed):
            value = found.value
            if is_class:
                args, value = (value, *args), value.__new__
            made, holders = _call(value, args, named)
            (self._own if holders <= ALONE else self._foreign)[id(made)] = made
            return made
        if named:
            raise UnpicklingError("a call with keyword arguments")
        for arg in args:
            self._pay(arg)
        return found(*args)

    def _pay(self, copied: Any) -> None:
        """Charge a container's elements to the budget. See [Note: bounds]."""
        if type(copied) in ELEMENTS:
            self._left -= len(copied)
        if self._left < 0:
            raise UnpicklingError("it declares more elements than it has bytes")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            self._pay(part if type(part) is dict else ())
        if isinstance(target, Placeholder):
            Placeholder.__setstate__(target, state)
        elif type(target) in STATEFUL and id(target) not in self._foreign:
            vars(target).update(_attributes(state))
        elif id(target) in self._own:
            _set_state(target, state)
        else:
            raise self._not_own(target)

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[number])


def _call(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, int]:
    """Return a function's result, and the result's reference count (lowest for a new object)."""
    made = function(*args, **named)
    return made, sys.getrefcount(made)


ALONE = _call(object, (), {})[1]  # the reference count of an object that only the caller references


def _set_state(target: Any, state: Any) -> None:
    setstate = getattr(target, "__setstate__", None)
    if setstate is not None:
        setstate(state)
        return
    slots = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        vars(target).update(_attributes(state))
    for name, value in _attributes(slots or {}).items():
        setattr(target, name, value)


def require_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for keys that are slow to hash or exceed Python's recursion limit."""
    for key in keys:
        left, count = [key], 0
        while left:
            inner = left.pop()
            if isinstance(inner, int):
                count += inner.bit_length() >> 6
            elif isinstance(inner, tuple):
                count += len(inner)
            if count > KEY_NELEMENTS:
                raise UnpicklingError("a key has too many elements")
            if isinstance(inner, tuple):
                left += inner


def _frozen_set(values: list[Any]) -> frozenset[Any]:
    require_keys(values)
    return frozenset(values)


def _attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise UnpicklingError("a state is not a dict with names as keys")
    return state


def _unknown(machine: Machine, _: object) -> None:
    raise UnpicklingError("there is no such instruction")


def _registered(machine: Machine, _: object) -> None:
    raise RefusedError("a class identified by its number in copyreg")


def _read_pair(file: IO[bytes]) -> list[str]:
    """Read a module and a name in it. ``pickletools`` would read only ASCII."""
    lines = [file.readline(), file.readline()]
    if not lines[1].endswith(b"\n"):
        raise UnpicklingError("a name is truncated")
    return [line[:-1].decode() for line in lines]


# Instructions by name. Opcodes that only protocols 0 and 1 use are not supported.
VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
STEPS: dict[str, Callable[[Machine, Any], object]] = {
    **dict.fromkeys(VALUES, Machine._push),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _registered),
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),
    "MARK": lambda m, _: m._mark(),
    "POP": lambda m, _: m._pop(),
    "POP_MARK": lambda m, _: m._marked(),
    "DUP": lambda m, _: m._push(m._stack[-1]),
    "NONE": lambda m, _: m._push(None),
    "NEWTRUE": lambda m, _: m._push(True),
    "NEWFALSE": lambda m, _: m._push(False),
    "EMPTY_TUPLE": lambda m, _: m._push(()),
    "TUPLE1": lambda m, _: m._tuple(1),
    "TUPLE2": lambda m, _: m._tuple(2),
    "TUPLE3": lambda m, _: m._tuple(3),
    "TUPLE": lambda m, _: m._push(tuple(m._marked())),
    "EMPTY_LIST": lambda m, _: m._push([]),
    "APPEND": lambda m, _: m._append([m._stack.pop()]),
    "APPENDS": lambda m, _: m._append(m._marked()),
    "EMPTY_DICT": lambda m, _: m._push({}),
    "SETITEM": lambda m, _: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    "SETITEMS": lambda m, _: m._set_items(m._marked()),
    "EMPTY_SET": lambda m, _: m._push(set()),
    "ADDITEMS": lambda m, _: m._add_items(m._marked()),
    "FROZENSET": lambda m, _: m._push(_frozen_set(m._marked())),
    "GLOBAL": lambda m, pair: m._fetch(*pair),
    "STACK_GLOBAL": lambda m, _: m._fetch(m._stack.pop(-2), m._stack.pop()),
    "REDUCE": lambda m, _: m._push(m._called(is_class=False)),
    "NEWOBJ": lambda m, _: m._push(m._called(is_class=True)),
    "NEWOBJ_EX": lambda m, _: m._push(m._called(is_class=True, has_names=True)),
    "BUILD": lambda m, _: m._build(),
    "BINPERSID": lambda m, _: m._push(m._persistent(m._stack.pop())),
    "BINPUT": Machine._put,
    "LONG_BINPUT": Machine._put,
    "MEMOIZE": lambda m, _: m._put(len(m._memo)),
    "BINGET": Machine._get,
    "LONG_BINGET": Machine._get,
}
# The step of each code, and the function that reads its argument. An argument without a step is not
# even read: ``int`` of a text needs quadratic time before Python 3.10.7.
CODES: dict[bytes, tuple[Callable[[Machine, Any], object], Callable[[IO[bytes]], Any] | None]] = {
    code.code.encode("latin-1"): (STEPS[code.name], None if code.arg is None else code.arg.reader)
    for code in pickletools.opcodes
    if code.name in STEPS
}
CODES[pickle.GLOBAL] = STEPS["GLOBAL"], _read_pair


# Names. See [Note: names that a pickle may use].

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# modules whose classes torch itself allows at import
OF_TORCH = ("torch.distributed.", "torch.nested.", "torch._dynamo.")
LATIN = ("latin1", "latin-1")  # encodings of bytes as text in protocol 2 (written by torch)


def _to_another_file(pid: Any) -> Any:
    raise UnpicklingError("a reference to another file")


def unpickle(
    data: bytes,
    names: Mapping[tuple[str, str], Any],
    *,
    trust: bool = False,
    persistent: Callable[[Any], Any] = _to_another_file,
) -> Any:
    """Unpickle with ``Machine`` or, if ``trust``, with Python's unpickler and all names."""
    if not trust:
        return Machine(data, names, persistent).run()
    return _Trusting(data, names, persistent).load()


class _Trusting(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        names: Mapping[Any, Any],
        persistent: Any,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent = names, persistent

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None or isinstance(found, Allowed):
            return super().find_class(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)


def plain_names() -> dict[tuple[str, str], Any]:
    made: dict[Any, Callable[..., Any]] = {}
    made |= {kind: _maker(kind) for kind in (int, float, complex, range, slice, torch.device)}
    made |= {kind: _maker(kind, ()) for kind in (bool, str, tuple)}
    made |= {kind: _maker(kind, ELEMENTS) for kind in (list, set, frozenset, deque, torch.Size)}
    made |= {kind: _maker(kind, DICTS) for kind in (dict, OrderedDict, Counter)}
    made |= {bytes: _maker_of_bytes(bytes), bytearray: _maker_of_bytes(bytearray)}
    kinds = {id(function): kind for kind, function in made.items()}

    def make_defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
        return defaultdict(None if factory is None else kinds[id(factory)])

    names: dict[tuple[str, str], Any] = {
        **{(kind.__module__, kind.__name__): function for kind, function in made.items()},
        ("collections", "defaultdict"): make_defaultdict,
        ("builtins", "Ellipsis"): ...,
        ("_codecs", "encode"): _encode,
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
    }
    for safe in torch.serialization.get_safe_globals():
        value, path = safe if isinstance(safe, tuple) else (safe, "")
        path = path or f"{value.__module__}.{value.__qualname__}"
        if not path.startswith(OF_TORCH):
            module, _, name = path.rpartition(".")
            names[module, name] = Allowed(value)
    return names


def _maker(kind: Any, kinds: tuple[type, ...] = (object,)) -> Callable[..., Any]:
    """Return a function that calls ``kind`` with a first argument of one of the types ``kinds``."""

    def make(*args: Any) -> Any:
        for first in args[:1]:
            if kinds != (object,):
                _require_kind(first, kinds)
            if kind in (set, frozenset):
                require_keys(first)
        return kind(*args)

    return make


def _maker_of_bytes(kind: Any) -> Callable[..., Any]:
    def make(content: Any = b"", codec: Any = None) -> Any:
        return kind(content if type(content) is bytes else _encode(content, codec))

    return make


def _encode(text: Any, codec: Any) -> bytes:
    _require_kind(text, (str,))
    if codec not in LATIN:
        raise UnpicklingError("bytes in an unsupported codec")
    return bytes(text, "latin-1")


def not_plain(what: str, error: RefusedError) -> ConfigError:
    return ConfigError(
        "FS616",
        f"load: {what} is not plain data: it needs {error}, and loading that could run arbitrary "
        "code. Pass trust=True if you trust its author, allow its class with "
        "torch.serialization.add_safe_globals, or save only numbers, strings, tensors, lists and "
        "dicts. Nothing was changed.",
    )


def _require_kind(given: Any, kinds: tuple[type, ...]) -> None:
    if type(given) not in kinds:
        raise UnpicklingError(f"it creates a container from a {type(given).__name__}")
