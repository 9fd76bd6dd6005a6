"""Rank processes import the libraries once, before they are forked, if any test here will run."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests._rank import PRELOADED

LIBRARIES = [
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.switch_transformers.modeling_switch_transformers",
    "peft",
]
LOADED_FOR = {"test_client_optimizers": ("bitsandbytes", "schedulefree", "torchao.optim")}
"""Libraries that only some tests need, and that may not be installed."""


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("ecosystem") for item in session.items):
        os.environ["HF_HUB_OFFLINE"] = "1"  # every model here is built from a config or a folder
        wanted = {name for item in session.items for name in LOADED_FOR.get(item.path.stem, ())}
        found = {name for name in wanted if importlib.util.find_spec(name.split(".")[0])}
        os.environ[PRELOADED] = ",".join([*LIBRARIES, *sorted(found)])
