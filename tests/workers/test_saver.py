"""States are written in the background, and their copies end with their orders."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from decode_kit import STORE_BYTES, contents, held_after
from redis_kit import eventually
from tiny_models import prompt

from engine.model import Model
from store.codec.header import Piece
from store.errors import StoreError
from store.saving import SaveReport
from store.store import Store
from store.turns import Turn
from worker_decode import saver as module
from worker_decode.saver import Saved, Saver
from worker_decode.states import export

TURN = "resp_" + "1" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "store", STORE_BYTES)
    yield made
    made.close()


@pytest.fixture
def order(llama: Model, store: Store) -> tuple[list[Piece], Piece]:
    """The state of a turn that is stored."""
    held, said = held_after(llama, prompt(50), 4, TURN)
    store.put_turn(
        Turn(
            TURN,
            "conv_" + "1" * 32,
            fingerprint=llama.fingerprint,
            prompt_ids=prompt(50),
            output_ids=said.tokens,
        )
    )
    return export(llama, held)


def test_what_is_queued_is_written(
    store: Store, llama: Model, order: tuple[list[Piece], Piece]
) -> None:
    done: list[Saved] = []
    saver = Saver(store, done.append)
    assert saver.room
    saver.put(TURN, 53, *order, None)
    saver.put("resp_" + "2" * 32, 53, *order, None)
    assert saver.close(60)
    good, bad = done
    assert (good.turn, good.tokens, good.error) == (TURN, 53, None)
    assert good.report is not None
    assert isinstance(bad.error, StoreError)
    assert bad.report is None
    reader = store.load_state(TURN, llama.fingerprint)
    assert reader is not None
    with reader:
        assert contents(list(reader)) == contents([*order[0], order[1]])


class Blocked(Store):
    """A store whose saves wait, and then fail in a way that nobody has foreseen."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.environment)
        self.may_go = threading.Event()
        self.entered = threading.Semaphore(0)

    def save_state(
        self, turn_id: str, pieces: Sequence[Piece], snapshot: Piece, *, base: str | None = None
    ) -> SaveReport:
        self.entered.release()
        assert self.may_go.wait(60)
        raise RuntimeError(f"{turn_id} cannot be saved")


def test_the_queue_is_bounded_by_number(
    store: Store, order: tuple[list[Piece], Piece], caplog: pytest.LogCaptureFixture
) -> None:
    blocked = Blocked(store)
    done: list[Saved] = []
    saver = Saver(blocked, done.append)
    saver.put("t0", 53, *order, None)
    assert blocked.entered.acquire(timeout=60)
    for number in range(module.MAX_QUEUED):
        assert saver.room
        saver.put(f"t{number + 1}", 53, *order, None)
    assert not saver.room
    assert not saver.close(0.0)  # a store that is stuck does not hold up the end
    blocked.may_go.set()
    eventually(lambda: len(done) == module.MAX_QUEUED + 1, "orders are lost")
    assert [saved.turn for saved in done] == [f"t{n}" for n in range(module.MAX_QUEUED + 1)]
    assert all(isinstance(saved.error, RuntimeError) for saved in done)
    assert "saving the state of t0 failed" in caplog.text
    assert saver.close(60)


def test_the_queue_is_bounded_by_bytes(
    store: Store, order: tuple[list[Piece], Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 1)
    blocked = Blocked(store)
    done: list[Saved] = []
    saver = Saver(blocked, done.append)
    assert saver.room
    saver.put("t", 53, *order, None)
    assert not saver.room
    blocked.may_go.set()
    eventually(lambda: done, "the order is lost")
    assert saver.room
    assert saver.close(60)


@pytest.mark.parametrize("turn", [TURN, "resp_" + "2" * 32])
def test_nothing_keeps_a_copy_once_it_is_written(
    store: Store, llama: Model, order: tuple[list[Piece], Piece], turn: str
) -> None:
    done: list[Saved] = []
    saver = Saver(store, done.append)
    pieces = [Piece(piece.header, piece.payload) for piece in order[0]]
    snapshot = Piece(order[1].header, order[1].payload)
    gone: list[Any] = [weakref.ref(piece) for piece in (*pieces, snapshot)]
    saver.put(turn, 53, pieces, snapshot, None)
    del pieces, snapshot

    def collected() -> bool:
        gc.collect()
        return bool(done) and all(ref() is None for ref in gone)

    eventually(collected, "the saver keeps the state while it waits for the next")
    assert saver.close(60)
