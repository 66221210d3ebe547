"""The receiving end of the link, opened once its address is there.

The address of a cable may be missing when this machine starts: conversations are served without
it, by prefilling here, and the link is opened when the cable is plugged in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from scheduler.host.late_bind import is_here
from transport.errors import LinkError
from transport.receiver import Receiver

log = logging.getLogger("tandem.decode")

LOOK_SECONDS = 2.0


class Doorway:
    """Makes the receiver now, or later from a thread; `opened(host:port)` is told then.

    Raises LinkError where the address is there and cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        make: Callable[[], Receiver],
        opened: Callable[[str], None],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._host = host
        self._make = make
        self._opened = opened
        self._look = look_seconds
        self._stop = threading.Event()
        self._receiver: Receiver | None = None
        self._thread: threading.Thread | None = None
        if is_here(host):
            self._open()
        else:
            log.warning(
                "the link is closed: %s is not an address of this machine now (is the cable in?); "
                "prompts are prefilled here until it is",
                host,
            )
            self._thread = threading.Thread(target=self._wait, name="doorway", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop waiting and close the receiver."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._receiver is not None:
            self._receiver.close()

    def _open(self) -> None:
        self._receiver = self._make()
        host, port = self._receiver.address
        log.info("the link listens on %s port %d", host, port)
        self._opened(f"{host}:{port}")

    def _wait(self) -> None:
        while not self._stop.wait(self._look):
            if is_here(self._host):
                try:
                    self._open()
                except LinkError as error:
                    log.warning("the link cannot be opened yet: %s", error)
                else:
                    return
