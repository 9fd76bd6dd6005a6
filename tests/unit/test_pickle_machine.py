"""The machine that runs pickles of others, and archives of ``torch.save``: what they give back."""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.checkpoint._pickle_machine import RefusedError, plain_names, unpickle
from fsdp2.checkpoint._torch_files import read_torch_file

PLAIN = [
    *(1, -5, 70_000, 2**70, -(2**70), 1.5, True, None, "x\ud800é", "", b"abc", b"", 1j),
    *(bytearray(b"x"), bytearray(), (), (1,), (1, 2, 3, 4), [], {}, {1: 2}, set(), {1, 2}),
    *(frozenset({3}), range(3), slice(1, 2), ..., "x" * 300, b"x" * 300, list(range(2000))),
    *(collections.Counter("abca"), collections.OrderedDict(b=1), collections.deque([1, 2], 2)),
    *(collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2})),
    *(torch.float16, torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda", 1)),
]
BASE = torch.arange(12.0).view(3, 4)
TENSORS: dict[str, Any] = {
    "plain": BASE,
    "transposed": BASE.t(),
    "part": BASE[1:, 2:],
    "number": torch.tensor(3),
    "empty": torch.zeros(0, 5),
    "expanded": torch.ones(1).expand(4, 5),
    "float8": BASE.to(torch.float8_e4m3fn),
    "bfloat16": BASE.bfloat16(),
    "bool": BASE > 3,
    "uint16": BASE.to(torch.uint16),
    "conjugate": torch.complex(BASE, BASE).conj(),
    "parameter": torch.nn.Parameter(BASE.clone()),
    "frozen": torch.nn.Parameter(BASE.clone(), requires_grad=False),
    "sparse": BASE.to_sparse(),
}


def again(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return read_torch_file(file, 0, file.tell(), verify=True)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back(protocol: int) -> None:
    found = unpickle(pickle.dumps(PLAIN, protocol), plain_names())
    assert found == PLAIN
    assert [type(one) for one in found] == [type(one) for one in PLAIN]
    found[-6]["new"].append(1)
    assert again(PLAIN) == PLAIN


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str) -> None:
    given, found = TENSORS[name], again(TENSORS[name])
    assert type(found) is type(given)
    assert (found.dtype, found.shape) == (given.dtype, given.shape)
    assert found.requires_grad == given.requires_grad
    assert found.layout == given.layout
    raw: list[Tensor] = [one.to_dense().to(torch.complex64) for one in (found, given)]
    assert torch.equal(*raw)


def test_what_is_shared_stays_shared() -> None:
    whole, part = again([BASE, BASE[0]])
    part.fill_(7)
    assert whole[0].tolist() == [7] * 4
    inner = [1]
    found = unpickle(pickle.dumps([inner, inner]), plain_names())
    assert found[0] is found[1]
    inner.append(inner)  # type: ignore[arg-type]  # a list in itself
    found = unpickle(pickle.dumps(inner), plain_names())
    assert found[1] is found


def test_attributes_of_containers_and_tensors() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    assert again(state)._metadata == state._metadata  # type: ignore[attr-defined]  # torch's own
    marked = BASE.clone()
    marked.note = "kept"  # type: ignore[attr-defined]  # any
    assert again(marked).note == "kept"


class Registered:
    """Every instance is known to the class, so that none is its maker's alone."""

    known: list[Any] = []  # noqa: RUF012

    def __new__(cls) -> Registered:
        made = super().__new__(cls)
        cls.known.append(made)
        return made


class Point:
    """What a user allows: instances that a pickle makes get their state."""

    def __init__(self, x: int) -> None:
        self.x = x


def test_instances_get_their_state_if_nobody_else_holds_them() -> None:
    data = pickle.dumps(Point(3)), pickle.dumps(Registered())
    with torch.serialization.safe_globals([Point, Registered]):
        assert unpickle(data[0], plain_names()).x == 3
        assert isinstance(unpickle(data[1], plain_names()), Registered)
        known = Registered()
        known.note = 1  # type: ignore[attr-defined]  # any
        with pytest.raises(RefusedError, match="that other code uses"):
            unpickle(pickle.dumps(known), plain_names())
    with pytest.raises(RefusedError, match="Point"):
        unpickle(data[0], plain_names())


def test_names_need_not_be_ascii() -> None:
    """Protocol 3 writes them in UTF-8."""
    with pytest.raises(RefusedError, match=r"módulo\.name"):
        unpickle(b"\x80\x03" + "cmódulo\nname\n.".encode(), plain_names())
    with pytest.raises(pickle.UnpicklingError, match="a name is truncated"):
        unpickle(b"\x80\x03cmodule\nname", plain_names())
