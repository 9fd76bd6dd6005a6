"""A machine that runs pickles of others: each instruction checked, and nothing but instructions.

Owns the instructions of pickles as Python 3 and torch write them, and what each may do. It must not
know which names a pickle may use, nor what is made of them: it is given a table.

[Note: what a pickle may do]
A pickle is a program: it fetches names, calls them, and changes what it has made. Here it calls
only what it fetched from the table, and it changes only what it has made itself: lists, dicts and
sets of its own instructions, stand-ins, and instances that a call has just made and nobody else
holds. So nothing that lives in this process is altered, whatever the table has.

[Note: bounds]
No instruction takes more memory than the pickle has bytes. A length is compared with what is left
before anything is made of it, and numbers in the memo are keys of a dict. Arguments of a call,
containers among them, and the state of an object are copied: each of their elements is charged
against a budget of the pickle's size in bytes. A pickle says each element once, while a memo could
repeat a long container in two bytes. A key is hashed whole each time, so it may have a thousand
elements, or words of a number.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

from fsdp2._core.base.names import printable

DICTS = (dict, OrderedDict, Counter, defaultdict)
LISTS = (list, deque)
STATEFUL = (OrderedDict, Counter)
"""Plain containers that may have attributes: a state dict of torch has one."""

ELEMENTS = (str, bytes, bytearray, tuple, list, set, frozenset, *DICTS, deque)
"""What a container may be made of, and pays for: not a range, of any length in a few bytes."""

KEY_NELEMENTS = 1000
"""Most elements of a tuple, or words of a number, that is a key: see [Note: bounds]."""

OLD_MODULES = {"__builtin__": "builtins"}
OLD_NAMES = {("builtins", "xrange"): "range", ("builtins", "long"): "int"}
"""As protocol 2, which torch writes, calls things: by their names in Python 2."""

INT = struct.Struct("<i")
UINT = struct.Struct("<I")
SHORT = struct.Struct("<H")
LENGTH = struct.Struct("<Q")
FLOAT = struct.Struct(">d")


class RefusedError(UnpicklingError):
    """A pickle names something that its table lacks, or alters what is not its own."""


class StandIn:
    """Holds what a pickle says about an object, in its place."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.args = state


@dataclass(frozen=True)
class Allowed:
    """What a user has allowed by name: the real function or class, in a table."""

    value: Any


class Machine:
    """Runs one pickle.

    Args:
        names: what a pickle finds under (module, name): a function or class made for this run, a
            constant, or something ``Allowed``.
        persistent: what it finds under a number or a tuple of its own.
    """

    def __init__(
        self,
        data: bytes,
        names: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self._data = data
        self._place = 0
        self._names = names
        self._persistent = persistent
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # stacks below a mark
        self._memo: dict[int, Any] = {}
        self._callable: dict[int, Any] = {}  # what was fetched, by id
        self._own: dict[int, Any] = {}  # instances that a call of an allowed name made
        self._foreign: dict[int, Any] = {}  # what such a call returned, and others hold
        self._left = len(data) + 1000  # see [Note: bounds]

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            RefusedError: it names what the table lacks, or alters what is not its own.
            UnpicklingError: it is damaged.
        """
        steps, data = STEPS, self._data
        try:
            while True:
                code = data[self._place]
                self._place += 1
                if code == STOP:
                    return self._stack.pop()
                steps[code](self)
        except (RefusedError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle underflows stacks, has no text, ...
            what = "" if isinstance(error, UnpicklingError) else f"{type(error).__name__}: "
            raise UnpicklingError(
                f"its pickle is damaged at byte {self._place}: {what}{error}"
            ) from error

    # What is read.

    def _take(self, count: int) -> bytes:
        start, end = self._place, self._place + count
        if not start <= end <= len(self._data):
            raise UnpicklingError(f"{count} bytes are told, and {len(self._data) - start} are left")
        self._place = end
        return self._data[start:end]

    def _number(self, form: struct.Struct) -> Any:
        (found,) = form.unpack(self._take(form.size))
        return found

    def _line(self) -> str:
        end = self._data.index(b"\n", self._place)
        text = self._data[self._place : end].decode()
        self._place = end + 1
        return text

    # The stack.

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

    # Constants.

    def _short_unicode(self) -> None:
        place, data = self._place + 1, self._data
        end = self._place = place + data[place - 1]
        text = data[place:end]
        if end > len(data):
            raise UnpicklingError("a text is cut off")
        self._stack.append(str(text, "utf-8", "surrogatepass"))

    def _byte(self) -> None:
        self._stack.append(self._data[self._place])
        self._place += 1

    def _short_get(self) -> None:
        self._stack.append(self._memo[self._data[self._place]])
        self._place += 1

    def _unicode(self, length: int) -> None:
        self._stack.append(str(self._take(length), "utf-8", "surrogatepass"))

    def _long(self, length: int) -> None:
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    # Containers.

    def _tuple_of_marked(self) -> None:
        found = tuple(self._marked())
        self._stack.append(found)

    def _set_of_marked(self) -> None:
        found = self._marked()
        require_keys(found)
        self._stack.append(frozenset(found))

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

    def _add_items(self) -> None:
        values = self._marked()
        target = self._target((set,))
        require_keys(values)
        target.update(values)

    def _target(self, kinds: tuple[type, ...]) -> Any:
        """Return what is to be changed: a container, or an instance, of this pickle's own."""
        target = self._stack[-1]
        is_own = (
            id(target) not in self._foreign if type(target) in kinds else id(target) in self._own
        )
        if not is_own:
            raise self._not_own(target)
        return target

    def _not_own(self, target: Any) -> UnpicklingError:
        """Return the error for a change of what others use, or of what cannot be changed."""
        what = target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"
        if id(target) in self._foreign or id(target) in self._callable:
            return RefusedError(f"to change {what} that others use")
        return UnpicklingError(f"{what} cannot be changed")

    # Names and calls. See [Note: what a pickle may do].

    def _fetch(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise UnpicklingError("a name is no text")
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

    def _stack_global(self) -> None:
        name = self._stack.pop()
        self._fetch(self._stack.pop(), name)

    def _reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(function, args, {}, is_class=False))

    def _new(self) -> None:
        args, cls = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(cls, args, {}, is_class=True))

    def _new_with_names(self) -> None:
        named, args, cls = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(cls, args, named, is_class=True))

    def _called(self, function: Any, args: Any, named: Any, *, is_class: bool) -> Any:
        if type(args) is not tuple or type(named) is not dict:
            raise UnpicklingError("arguments are no tuple")
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
            raise UnpicklingError("a call with names")
        for arg in args:
            self._pay(arg)
        return found(*args)

    def _pay(self, copied: Any) -> None:
        """Charge for the elements of a container that is copied. See [Note: bounds]."""
        if type(copied) in ELEMENTS:
            self._left -= len(copied)
        if self._left < 0:
            raise UnpicklingError("it says more elements than it has bytes")

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            self._pay(part if type(part) is dict else ())
        if isinstance(target, StandIn):
            StandIn.__setstate__(target, state)
        elif type(target) in STATEFUL and id(target) not in self._foreign:
            vars(target).update(_attributes(state))
        elif id(target) in self._own:
            _set_state(target, state)
        else:
            raise self._not_own(target)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise UnpicklingError("a reference to another file")
        self._stack.append(self._persistent(self._stack.pop()))

    # The memo.

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]


def _call(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, int]:
    """Return what a function returns, and how many hold it: nobody else what it has just made."""
    made = function(*args, **named)
    return made, sys.getrefcount(made)


ALONE = _call(object, (), {})[1]
"""What ``_call`` counts for an object that only its caller has."""


def _set_state(target: Any, state: Any) -> None:
    """Do what ``pickle`` does with the state of an instance."""
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
    """Raise ValueError for what takes long to hash, or is deeper than Python's stack."""
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


def _attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or any(type(name) is not str for name in state):
        raise UnpicklingError("a state is no dict of names")
    return state


STOP = pickle.STOP[0]


def _unknown(machine: Machine) -> None:
    raise UnpicklingError("there is no such instruction")


def _registered(machine: Machine) -> None:
    raise RefusedError("a class by its number in copyreg")


def _pushes(make: Callable[[Machine], Any]) -> Callable[[Machine], object]:
    return lambda m: m._stack.append(make(m))


STEPS: list[Callable[[Machine], object]] = [_unknown] * 256
"""By the byte of an instruction. Those that only protocols 0 and 1 have are unknown."""

for _code, _step in {
    pickle.PROTO: lambda m: m._take(1),
    pickle.FRAME: lambda m: m._take(8),
    pickle.MARK: Machine._mark,
    pickle.POP: Machine._pop,
    pickle.POP_MARK: lambda m: m._marked(),
    pickle.DUP: lambda m: m._stack.append(m._stack[-1]),
    pickle.NONE: lambda m: m._stack.append(None),
    pickle.NEWTRUE: lambda m: m._stack.append(True),
    pickle.NEWFALSE: lambda m: m._stack.append(False),
    pickle.BININT: _pushes(lambda m: m._number(INT)),
    pickle.BININT1: Machine._byte,
    pickle.BININT2: _pushes(lambda m: m._number(SHORT)),
    pickle.LONG1: lambda m: m._long(m._take(1)[0]),
    pickle.LONG4: lambda m: m._long(m._number(INT)),
    pickle.BINFLOAT: _pushes(lambda m: m._number(FLOAT)),
    pickle.SHORT_BINUNICODE: Machine._short_unicode,
    pickle.BINUNICODE: lambda m: m._unicode(m._number(UINT)),
    pickle.BINUNICODE8: lambda m: m._unicode(m._number(LENGTH)),
    pickle.SHORT_BINBYTES: _pushes(lambda m: m._take(m._take(1)[0])),
    pickle.BINBYTES: _pushes(lambda m: m._take(m._number(UINT))),
    pickle.BINBYTES8: _pushes(lambda m: m._take(m._number(LENGTH))),
    pickle.BYTEARRAY8: _pushes(lambda m: bytearray(m._take(m._number(LENGTH)))),
    pickle.EMPTY_TUPLE: lambda m: m._stack.append(()),
    pickle.TUPLE1: lambda m: m._tuple(1),
    pickle.TUPLE2: lambda m: m._tuple(2),
    pickle.TUPLE3: lambda m: m._tuple(3),
    pickle.TUPLE: Machine._tuple_of_marked,
    pickle.EMPTY_LIST: lambda m: m._stack.append([]),
    pickle.APPEND: lambda m: m._append([m._stack.pop()]),
    pickle.APPENDS: lambda m: m._append(m._marked()),
    pickle.EMPTY_DICT: lambda m: m._stack.append({}),
    pickle.SETITEM: lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    pickle.SETITEMS: lambda m: m._set_items(m._marked()),
    pickle.EMPTY_SET: lambda m: m._stack.append(set()),
    pickle.ADDITEMS: Machine._add_items,
    pickle.FROZENSET: Machine._set_of_marked,
    pickle.GLOBAL: lambda m: m._fetch(m._line(), m._line()),
    pickle.STACK_GLOBAL: Machine._stack_global,
    pickle.EXT1: _registered,
    pickle.EXT2: _registered,
    pickle.EXT4: _registered,
    pickle.REDUCE: Machine._reduce,
    pickle.NEWOBJ: Machine._new,
    pickle.NEWOBJ_EX: Machine._new_with_names,
    pickle.BUILD: Machine._build,
    pickle.BINPERSID: Machine._persistent_id,
    pickle.BINPUT: lambda m: m._put(m._take(1)[0]),
    pickle.LONG_BINPUT: lambda m: m._put(m._number(UINT)),
    pickle.BINGET: Machine._short_get,
    pickle.LONG_BINGET: lambda m: m._stack.append(m._memo[m._number(UINT)]),
    pickle.MEMOIZE: lambda m: m._put(len(m._memo)),
}.items():
    STEPS[_code[0]] = _step
