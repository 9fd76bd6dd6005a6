"""Tensors in any container; nothing is copied unless a tensor in it changes."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from fsdp2._core.base.containers import Loan, map_tensors, visit_tensors

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    x: Any
    name: str


@dataclass
class Output:
    x: Any
    name: str = "output"
    derived: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.built = True


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


class ListOfSomething(list[Any]):
    pass


class ModelOutput(OrderedDict[str, Any]):
    """Like those of a well-known library: a dict whose items are attributes too; no updates."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("set items one by one")


def ordered(x: Any) -> ModelOutput:
    output = ModelOutput()
    output["x"] = x
    output["note"] = "kept"
    return output


ONE = torch.ones(2)

CONTAINERS: dict[str, Any] = {
    "tensor": lambda x: x,
    "list": lambda x: [x, 1, None],
    "tuple": lambda x: (x, "text"),
    "empty beside it": lambda x: (x, [], (), {}),
    "namedtuple": lambda x: Pair(x, 3),
    "NamedTuple": lambda x: Typed(x, "n"),
    "list subclass": lambda x: ListOfSomething([x]),
    "dict": lambda x: {"x": x, 3: 1.5},
    "OrderedDict": lambda x: OrderedDict(a=1, x=x),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "ModelOutput": ordered,
    "UserDict": lambda x: UserDict({"x": x}),
    "read-only mapping": lambda x: MappingProxyType({"x": x}),
    "dataclass": lambda x: Output(x),
    "frozen dataclass": lambda x: Frozen(x),
    "dataclass with slots": lambda x: Slotted(x),
    "nested": lambda x: {"a": [Pair(Output((x,)), {"b": x}), Frozen([x])]},
}


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def found_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(record, value)
    return found


@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_are_replaced_and_the_rest_kept(name: str) -> None:
    make = CONTAINERS[name]
    value = make(ONE)
    before = found_in(value)
    assert before
    assert all(tensor is ONE for tensor in before)
    changed = map_tensors(double, value)
    expected_type = dict if name == "read-only mapping" else type(value)
    assert type(changed) is expected_type
    assert [tensor.tolist() for tensor in found_in(changed)] == [[2.0, 2.0]] * len(before)
    assert all(tensor is ONE for tensor in found_in(value)), "the argument was changed"


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_call_in_which_nothing_changes_returns_the_same_object(name: str) -> None:
    value = CONTAINERS[name](ONE)
    assert map_tensors(lambda tensor: tensor, value) is value


def test_unchanged_parts_keep_their_identity() -> None:
    other = torch.zeros(1)
    untouched = [other, {"y": other}]
    changed = map_tensors(lambda t: t + 1 if t is ONE else t, {"a": untouched, "b": [ONE]})
    assert changed["a"] is untouched
    assert changed["b"][0].tolist() == [2.0, 2.0]


def test_what_containers_carry_besides_stays() -> None:
    output = map_tensors(double, ordered(ONE))
    assert output.x.tolist() == [2.0, 2.0]
    assert list(output) == ["x", "note"]
    assert map_tensors(double, defaultdict(list, x=ONE)).default_factory is list
    dataclass_output = Output(ONE)
    dataclass_output.derived = ONE
    changed = map_tensors(double, dataclass_output)
    assert changed.built
    assert changed.name == "output"
    assert changed.derived.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("value", [None, "text", 1, 2.5, True, Output, nn.Linear(2, 2), object()])
def test_what_is_no_container_is_left_alone(value: Any) -> None:
    assert map_tensors(double, value) is value


def test_a_parameter_of_a_module_is_not_an_output() -> None:
    assert found_in([nn.Linear(2, 2)]) == []


def test_torchs_return_types_are_tuples() -> None:
    result = torch.tensor([[3.0, 5.0]]).max(dim=1)
    assert len(found_in(result)) == 2
    same = map_tensors(lambda tensor: tensor, result)
    assert same is result


WRITABLE = {"list", "list subclass", "dict", "OrderedDict", "defaultdict", "ModelOutput"}
WRITABLE |= {"UserDict", "dataclass", "dataclass with slots", "nested"}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_loan_is_given_back(name: str) -> None:
    value = CONTAINERS[name](ONE)
    loan = Loan(double)
    lent = loan.exchange(value)
    assert [tensor.tolist() for tensor in found_in(lent)] == [[2.0, 2.0]] * len(found_in(value))
    assert (lent is value) is (name in WRITABLE)
    loan.give_back()
    assert all(tensor is ONE for tensor in found_in(value))
    assert loan.with_added("output") == "output"


def test_what_was_done_to_a_loan_stays() -> None:
    rows, new = [ONE, "b"], torch.zeros(1)
    shared = {"rows": (rows, 1), "again": rows, "x": ONE}
    loan = Loan(double)
    assert loan.exchange(shared) is shared
    assert shared["rows"][0] is rows
    assert rows[0].tolist() == [2.0, 2.0], "exchanged once, though it is there twice"
    rows.insert(0, new)
    shared["moved"] = shared.pop("x")
    shared["new"] = [new]
    loan.give_back()
    assert rows[1:] == [ONE, "b"]
    assert shared["moved"] is ONE
    loan.map_added(lambda tensor: tensor + 1)
    assert rows[0].tolist() == shared["new"][0].tolist() == [1.0]
    output, added = loan.with_added("output")
    assert output == "output"
    assert {id(tensor) for tensor in found_in(added)} == {id(rows[0]), id(shared["new"][0])}


class Converts(UserDict[str, Any]):
    """Keeps copies of what it is given."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.clone())


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cast_that_was_updated_in_place_is_given_back(mode: Any, is_written: bool) -> None:
    """In the caller's dtype; a cast that was only read leaves the caller's tensor there."""
    with mode():
        original = torch.tensor([0.1, 0.7])
        value = [original]
        loan = Loan(lambda tensor: tensor.to(torch.bfloat16))
        loan.exchange(value)
        if is_written:
            value[0].mul_(0.5)
        loan.give_back()
        assert (value[0] is original) is not is_written
        assert value[0].dtype is torch.float32
        if is_written:
            assert value[0].tolist() == (original.to(torch.bfloat16) * 0.5).float().tolist()


class Makes(UserDict[str, Any]):
    """Makes its items when it is asked for them."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).clone()


class MakesToo(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key).clone()


@pytest.mark.parametrize("kind", [Converts, Makes, MakesToo])
def test_mappings_that_do_not_keep_what_they_are_given(kind: Any) -> None:
    value = kind({"x": ONE})
    loan = Loan(double)
    assert loan.exchange(value)["x"].tolist() == [2.0, 2.0]
    loan.give_back()
    assert value["x"].tolist() == [1.0, 1.0]


leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just(ONE))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree(tree: Any) -> None:
    count = len(found_in(tree))
    changed = map_tensors(double, tree)
    assert (changed is tree) == (count == 0)
    assert [tensor.tolist() for tensor in found_in(changed)] == [[2.0, 2.0]] * count


# --- looking only ---------------------------------------------------------------------------------


class Plain:
    """An object like any other, which may refer to itself."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.me = self


def visited_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    visit_tensors(found.append, value)
    return found


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_looked_into(name: str) -> None:
    found = visited_in(CONTAINERS[name](ONE))
    assert found
    assert all(tensor is ONE for tensor in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Plain([x]),
        lambda x: {x},
        lambda x: [Plain(Plain(x))],
        lambda x: deque([x]),
        lambda x: {"x": x}.values(),
        lambda x: lambda kept=x: kept,
        lambda x: lambda *, kept=x: kept,
    ],
)
def test_other_objects_are_looked_into_too(make: Any) -> None:
    assert [tensor is ONE for tensor in visited_in(make(ONE))] == [True]


def test_cycles_end() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert len(visited_in(loop)) == 1


@pytest.mark.parametrize("value", [None, "text", 1, 2.5, Output, nn.Linear(2, 2), torch.float32])
def test_modules_and_plain_values_hold_no_outputs(value: Any) -> None:
    assert visited_in([value]) == []


@given(trees)
def test_looking_finds_what_replacing_finds(tree: Any) -> None:
    assert bool(visited_in(tree)) == bool(found_in(tree))


@dataclass
class WithMore:
    """A container by its field; callers may hang more on it."""

    x: Any


@pytest.mark.parametrize(
    "make", [lambda: ListOfSomething([torch.zeros(1)]), lambda: WithMore(None)]
)
def test_what_hangs_on_a_container_is_looked_into(make: Any) -> None:
    container = make()
    container.aside = [ONE]
    assert any(tensor is ONE for tensor in visited_in(container))
