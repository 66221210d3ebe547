"""A small pulse of work that keeps an idle GPU from slowing its clocks down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import mlx.core as mx

from engine.device import Device

METAL_INTERVAL = 2.0  # an idle GPU needs over a second for its first work after some 17 s
SIDE = 256  # a product of this size takes microseconds on a GPU


def keepalive_interval(asked: float, device: Device) -> float:
    """Seconds between pulses: as asked, or for -1 what suits the device (a CPU needs none)."""
    if asked >= 0:
        return asked
    return METAL_INTERVAL if device.kind == "metal" else 0.0


class KeepAlive:
    """A thread that runs one small matrix product every `interval` seconds while idle.

    Apple's GPUs lower their clocks after a short idle time and need tens of milliseconds to come
    back, which the first token of the next request would pay. `working` suspends the pulse, `wake`
    gives one at once (when a hand-off is offered). An interval of 0 never pulses by itself.
    MLX's streams belong to threads, so the thread makes and evaluates its own arrays only.
    """

    def __init__(self, interval: float) -> None:
        if not 0 <= interval <= 3600:
            raise ValueError(f"a keep-alive interval lies between 0 and 3600 s, not {interval}")
        self.interval = interval
        self._changed = threading.Condition()
        self._busy = 0
        self._wake = False
        self._stopped = False
        self._pulses = 0
        self._thread = threading.Thread(target=self._run, name="tandem-keepalive", daemon=True)
        self._thread.start()

    @property
    def pulses(self) -> int:
        """Pulses given so far."""
        with self._changed:
            return self._pulses

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """No pulses inside: the device is busy. May be nested and used from any thread."""
        with self._changed:
            self._busy += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def wake(self) -> None:
        """Pulse now, unless the device is busy."""
        with self._changed:
            self._wake = True
            self._changed.notify_all()

    def wait(self, pulses: int, timeout: float) -> bool:
        """Wait until so many pulses have been given; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pulses >= pulses, timeout)

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        matrix = mx.ones((SIDE, SIDE))
        mx.eval(matrix)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._wake or self._busy > 0, self.interval or None
                )
                # After work a whole interval passes before the next pulse.
                idle = not self._busy and (self._wake or self.interval > 0)
                if self._busy and not self._stopped:
                    self._wake = False
                    self._changed.wait_for(lambda: self._stopped or not self._busy)
                    continue
                if self._stopped:
                    return
                self._wake = False
            if idle:
                mx.eval(matrix @ matrix)
                with self._changed:
                    self._pulses += 1
                    self._changed.notify_all()
