"""What is admitted, what is kept, and that every way out gives the memory back."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from decode_kit import LONG, contents, deliver, offer, state_of
from redis_kit import eventually

from engine.model import Model
from store.codec.header import Piece
from transport.sink import Grant, Refusal
from worker_decode.inbox import Inbox
from worker_decode.memory import Memory


@pytest.fixture(scope="module")
def state(llama: Model) -> list[Piece]:
    return state_of(llama, list(range(3, 103)))


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 22)


@pytest.fixture
def inbox(llama: Model, memory: Memory) -> Inbox:
    return Inbox(llama.fingerprint, memory, 0.0)


def test_a_state_is_kept_until_it_is_taken(
    inbox: Inbox, memory: Memory, llama: Model, state: list[Piece]
) -> None:
    deliver(inbox, llama, "resp_a", state)
    nbytes = sum(piece.payload.nbytes for piece in state)
    assert memory.used == inbox.received_bytes == nbytes  # what was promised too much is back
    assert inbox.take("resp_b") is None
    taken = inbox.take("resp_a")
    assert taken is not None
    assert contents(taken) == contents(state)
    assert memory.used == 0
    assert inbox.take("resp_a") is None


def test_another_model_is_refused(inbox: Inbox, memory: Memory, llama: Model) -> None:
    foreign = dataclasses.replace(offer(llama, "resp_a", 10), fingerprint=b"x" * 16)
    answer = inbox.admit(foreign)
    assert isinstance(answer, Refusal)
    assert (answer.code, memory.used) == ("fingerprint", 0)
    assert "same model files" in answer.reason


def test_beyond_the_budget_is_refused(inbox: Inbox, memory: Memory, llama: Model) -> None:
    assert inbox.admit(offer(llama, "resp_a", memory.limit)) == Grant(memory.limit)
    for nbytes in (1, memory.limit + 1):
        answer = inbox.admit(offer(llama, "resp_b", nbytes))
        assert isinstance(answer, Refusal)
        assert answer.code == "memory"
        assert f"no memory for {nbytes} bytes" in answer.reason
        assert "store.hot_gb" in answer.reason
    inbox.abort("resp_a", "gone")
    assert memory.used == 0


def test_an_offer_waits_for_memory_and_says_so(llama: Model, memory: Memory) -> None:
    pressed = threading.Event()
    inbox = Inbox(llama.fingerprint, memory, 60.0, pressed.set)
    memory.take(memory.limit)
    answers: list[object] = []
    waiting = threading.Thread(target=lambda: answers.append(inbox.admit(offer(llama, "r", 8))))
    waiting.start()
    assert pressed.wait(LONG)
    eventually(lambda: memory.wanted == 8, "the wish is not seen")
    memory.release(memory.limit)
    waiting.join()
    assert answers == [Grant(8)]
    assert memory.used == 8


def test_half_a_state_is_never_taken(
    inbox: Inbox, memory: Memory, llama: Model, state: list[Piece]
) -> None:
    inbox.admit(offer(llama, "resp_a", 1 << 20, transfer="t1"))
    inbox.piece("t1", state[0])
    assert inbox.take("resp_a") is None
    assert memory.used == 1 << 20
    inbox.abort("t1", "the link broke")
    inbox.abort("t1", "again")
    assert memory.used == 0


def test_a_newer_run_replaces_an_older(
    inbox: Inbox, memory: Memory, llama: Model, state: list[Piece]
) -> None:
    deliver(inbox, llama, "resp_a", state)
    inbox.admit(offer(llama, "resp_a", 1000, transfer="newer"))
    assert memory.used == 1000
    assert inbox.take("resp_a") is None
    with pytest.raises(KeyError):  # the receiver ends the older transfer when it hears this
        inbox.piece("resp_a", state[0])
    with pytest.raises(KeyError):
        inbox.done("resp_a")
    inbox.abort("resp_a", "replaced")
    assert memory.used == 1000
    inbox.discard("resp_a")
    inbox.discard("resp_a")
    assert memory.used == 0


def test_an_older_runs_memory_serves_the_newer(inbox: Inbox, memory: Memory, llama: Model) -> None:
    inbox.admit(offer(llama, "resp_a", memory.limit, transfer="older"))
    assert inbox.admit(offer(llama, "resp_a", memory.limit, transfer="newer")) == Grant(
        memory.limit
    )
    assert memory.used == memory.limit
    inbox.discard("resp_a")
    assert memory.used == 0


def test_what_nobody_comes_for_is_swept(
    inbox: Inbox, memory: Memory, llama: Model, state: list[Piece]
) -> None:
    deliver(inbox, llama, "resp_a", state)
    inbox.admit(offer(llama, "resp_b", 1000))
    assert inbox.waiting(1e6) == []
    assert sorted(inbox.waiting(-1.0)) == ["resp_a", "resp_b"]
    inbox.sweep(["resp_a", "resp_x"])
    assert memory.used == 1000
    inbox.sweep(["resp_b"])
    assert memory.used == 0


def test_buffers_are_writable_bytes(inbox: Inbox) -> None:
    buffer = inbox.buffer("t", 1 << 16)
    assert (buffer.nbytes, buffer.itemsize, buffer.readonly) == (1 << 16, 1, False)
