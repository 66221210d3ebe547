"""Calls that a test holds until they may go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Held:
    """Stands for a function; its calls wait for `release`, those of them that `when` names.

    `begun`: how many have begun; `most`: how many were inside at once.
    """

    def __init__(
        self, function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True
    ) -> None:
        self._function, self._when = function, when
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._inside = 0
        self.begun = self.most = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._when(*args):
            return self._function(*args, **options)
        with self._lock:
            self.begun += 1
            self._inside += 1
            self.most = max(self.most, self._inside)
        try:
            assert self._go.wait(120), "nobody lets it go on"
            return self._function(*args, **options)
        finally:
            with self._lock:
                self._inside -= 1

    def release(self) -> None:
        """Let all go on, these and later ones."""
        self._go.set()
