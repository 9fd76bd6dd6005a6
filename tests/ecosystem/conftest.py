"""Rank processes import the libraries once, before they are forked, if any test here will run."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.kit.rank import PRELOADED

LIBRARIES = [
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.switch_transformers.modeling_switch_transformers",
    "peft",
]
OF_CLIENTS = {
    "test_client_lightning": ["lightning", "lightning.pytorch.strategies"],
    "test_client_optimizers": ["bitsandbytes", "schedulefree", "torchao.optim"],
    "test_client_torchtitan": ["torchtitan.trainer", "examples.clients._torchtitan_on_cpu"],
    "test_client_torchao": ["torchao.float8", "torchao.prototype.quantized_training"],
}
"""What only some files need, by their names; the first of each list may not be installed."""


def pytest_collection_finish(session: pytest.Session) -> None:
    here = {item.path.stem for item in session.items if item.get_closest_marker("ecosystem")}
    if not here:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # every model here is built from a config or a folder
    wanted = list(LIBRARIES)
    for names in (names for file, names in OF_CLIENTS.items() if file in here):
        if importlib.util.find_spec(names[0].partition(".")[0]) is not None:
            wanted += names
    os.environ[PRELOADED] = ",".join(wanted)
