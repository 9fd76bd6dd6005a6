"""Promise: the calls by which public programs use FSDP2 do what they do with torch's own.

`_patterns` has them: verl, LLaMA-Factory (accelerate), torchtune, OLMo-core, NeMo Automodel,
xtuner, composer, lingua and dion. Each runs with torch's own and with ours; bits are compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor

import fsdp2
from tests.ecosystem import _patterns
from tests.kit.parity import assert_same
from tests.kit.pool import ranks

OF_TWO = {
    "verl": _patterns.verl,
    "LLaMA-Factory": _patterns.llama_factory,
    "torchtune": _patterns.torchtune,
    "Automodel": _patterns.automodel,
    "xtuner": partial(_patterns.xtuner, offload=False),
    "xtuner, offloaded": partial(_patterns.xtuner, offload=True),
    "composer": _patterns.composer,
    "dion": _patterns.dion,
}
OF_FOUR = {
    "OLMo-core, full": partial(_patterns.olmo_core, strategy="full"),
    "OLMo-core, blocks": partial(_patterns.olmo_core, strategy="blocks"),
    "OLMo-core, fine-grained": partial(_patterns.olmo_core, strategy="fine_grained"),
    "lingua": _patterns.lingua,
}


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Name the places where two results are not the same, bit for bit."""
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: {sorted(ours)} and {sorted(theirs)}"]
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} and {len(theirs)}"]
        pairs = [(number, *pair) for number, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        if not isinstance(ours, Tensor):
            return [] if ours == theirs else [f"{path}: {ours} and {theirs}"]
        one, other = _patterns.whole(ours), _patterns.whole(theirs)
        if torch.equal(one, other) and one.dtype == other.dtype:
            return []
        return [f"{path}: {one.dtype}, {other.dtype}, by {(one - other).abs().max():.3g}"]
    return [text for key, one, other in pairs for text in differences(one, other, f"{path}/{key}")]


def compare(pattern: Any) -> None:
    theirs, ours = pattern(torch_fsdp), pattern(fsdp2)
    assert theirs.keys()
    found = differences(ours, theirs)
    assert not found, f"{len(found)} differences\n" + "\n".join(found[:5])


@pytest.mark.parametrize("name", OF_TWO)
@ranks(2)
def test_on_two_ranks(name: str) -> None:
    """Losses, norms, states that are saved, and what programs read: the same bits."""
    compare(OF_TWO[name])


@pytest.mark.parametrize("name", OF_FOUR)
@ranks(4)
def test_on_four_ranks(name: str) -> None:
    """With replicas of shards, and with tensor-parallel layers: the same bits."""
    compare(OF_FOUR[name])


@ranks(2)
def test_a_pattern_that_differs_is_seen() -> None:
    """The comparison above is one: another seed, another number of units, a missing name."""
    one = _patterns.dion(fsdp2)
    other = {"state": {**one["state"], "norm.weight": one["state"]["norm.weight"] + 1e-7}}
    assert [text.partition(":")[0] for text in differences(one, other)] == ["/state/norm.weight"]
    assert differences(one, {}) == [": ['state'] and []"]


@ranks(2)
def test_whole_matrices_are_those_of_a_plain_model() -> None:
    """dion's pattern on shards is the plain model on all tokens, up to rounding."""
    plain, ours = _patterns.dion(None), _patterns.dion(fsdp2)
    for name, value in plain["state"].items():
        assert_same(ours["state"][name], value, name, 1e-4)


@ranks(2)
def test_what_composer_writes_back_is_kept() -> None:
    """Parameters that a program registers between forwards; torch's own goes on with the old."""
    plain = _patterns.composer_write_back(None)
    ours, theirs = (_patterns.composer_write_back(library) for library in (fsdp2, torch_fsdp))
    assert_same(ours["after"], plain["after"], "ours", 1e-6)
    assert torch.equal(ours["before"], theirs["before"])
    assert torch.equal(theirs["after"], theirs["before"])
