"""The keep-alive pulse: while idle, never while busy, at once when woken."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from engine.keepalive import KeepAlive

SAFETY = 60.0


@pytest.fixture
def pulse() -> Iterator[KeepAlive]:
    keepalive = KeepAlive(0.001)
    yield keepalive
    keepalive.stop()


def test_it_pulses_while_idle_and_stops(pulse: KeepAlive) -> None:
    assert pulse.wait(3, SAFETY)
    pulse.stop()
    assert not pulse._thread.is_alive()


def test_no_pulse_while_busy(pulse: KeepAlive) -> None:
    with pulse.working():
        with pulse.working():
            before = pulse.pulses
            pulse.wake()
            for _ in range(50):  # far more than the interval's worth of work
                mx.eval(mx.ones((200, 200)) @ mx.ones((200, 200)))
        assert pulse.pulses <= before + 1  # one may have been under way
    assert pulse.wait(before + 2, SAFETY)


def test_a_wake_up_pulses_at_once() -> None:
    keepalive = KeepAlive(0)
    assert keepalive.pulses == 0
    keepalive.wake()
    assert keepalive.wait(1, SAFETY)
    keepalive.wake()
    assert keepalive.wait(2, SAFETY)
    keepalive.stop()
    assert keepalive.pulses == 2


def test_the_model_runs_beside_it(pulse: KeepAlive, small: object) -> None:
    from engine.model import Model
    from engine.solo import answer

    assert isinstance(small, Model)
    first = answer(small, list(range(2, 60)))
    assert answer(small, list(range(2, 60))).tokens == first.tokens
    assert pulse.wait(1, SAFETY)


def test_the_interval_is_bounded() -> None:
    with pytest.raises(ValueError, match="interval"):
        KeepAlive(-1)
