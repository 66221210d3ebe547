"""Fixtures of the workers' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from decode_kit import LONG, tiny
from model_dirs import make_tiny_model
from moving_kit import Pair

from engine.device import prepare
from engine.model import Model, load
from engine.text import load_tokenizer


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sound here is waited for, also by the product: a machine that stalls is no fault."""
    monkeypatch.setattr("transport.receiver.HANDSHAKE_SECONDS", LONG)
    monkeypatch.setattr("store.remote.HELLO_SECONDS", LONG)
    monkeypatch.setattr("scheduler.balancing._ASK", LONG)
    monkeypatch.setattr("worker_decode.moving._PATIENCE", LONG)
    monkeypatch.setattr("worker_decode.sealing._WAIT", LONG)
    monkeypatch.setattr("worker_decode.keeping._RETRY", 3600.0)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("workers") / "tiny")


@pytest.fixture(scope="session")
def loaded(model_path: Path) -> Model:
    """A tiny model from files."""
    return load(model_path, prepare())


@pytest.fixture(scope="session")
def words(model_path: Path) -> Any:
    """Its tokenizer."""
    return load_tokenizer(model_path)


@pytest.fixture(scope="session")
def llama() -> Model:
    return tiny("llama")


@pytest.fixture(scope="session", params=["llama", "gemma3", "qwen3_next", "glm5_next"])
def model(request: pytest.FixtureRequest) -> Model:
    """Plain rows; a sliding window; recurrent state beside rows; pooled rows."""
    return tiny(request.param)


@pytest.fixture
def pair(redis_url: str, client: redis.Redis, loaded: Model, words: Any) -> Iterator[Pair]:
    """Two decode nodes, of which m3 leaves and m4 takes over."""
    made = Pair(redis_url, client, loaded, words)
    yield made
    made.close()
