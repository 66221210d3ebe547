"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stack_kit import Running, running

from engine.library import DEFAULT_MODEL, resolve
from store.paths import models_dir


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model, fetched if it is not here yet."""
    return resolve(DEFAULT_MODEL, models_dir())


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    """A stack that the tests of one module share."""
    yield from running(model_dir)
