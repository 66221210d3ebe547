"""The connections of this process that wait for foreground responses, as Redis is told of them.

Each has a name of its own, so that whatever is said of it may be said twice. It counts for as long
as its lease is renewed: those of a process that was killed are missed when that has run out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scheduler.api.items import new_id
from scheduler.jobs import CLIENT_LEASE, RETRIEVED_WITHIN, Jobs
from scheduler.record import JobNotFound
from scheduler.redis_client import AWAY

log = logging.getLogger("tandem.api")

RENEW_EVERY = CLIENT_LEASE / 3
AGAIN_AFTER = 1.0
"""Seconds until Redis is tried again where it was away."""


def new_client() -> str:
    """A name for a connection."""
    return new_id("client")


@dataclass(slots=True, eq=False)
class Client:
    """One connection that waits for `response`.

    `over`: the response has ended, and nobody waits for it any more. `returns`: it did not go by
    itself, and may come to retrieve the response.
    """

    response: str
    name: str = field(default_factory=new_client)
    over: bool = False
    returns: bool = False


class Clients:
    """Renews the leases of those that are there and tells of those that have gone. Thread-safe.

    One thread does both, one after the other: nobody is said to wait who was said to have gone.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._here: set[Client] = set()
        self._gone: deque[Client] = deque()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def start(self) -> None:
        """Begin to tell of them."""
        self._thread.start()

    def close(self) -> None:
        """Tell that all had to go, where Redis is there to hear it, and end."""
        with self._lock:
            here, self._here = self._here, set()
        for client in here:
            client.returns = True
        self._gone.extend(client for client in here if not client.over)
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    @contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """The client waits in here; however this ends, it is gone then. Does not block."""
        with self._lock:
            self._here.add(client)
        try:
            yield
        except asyncio.CancelledError:
            client.returns = True  # the API is stopped: the client would wait still
            raise
        finally:
            with self._lock:
                self._here.discard(client)
            if not client.over:
                log.info("a client of %s has gone", client.response)
                self._gone.append(client)
                self._wake.set()

    def renew(self) -> None:
        """Tell who is there. Raises what Redis raises."""
        with self._lock:
            here = [(client.response, client.name) for client in self._here if not client.over]
        self._jobs.attend(here)

    def tell_gone(self) -> None:
        """Tell who has gone. Raises what Redis raises while it is away; nobody is forgotten."""
        while self._gone:
            client = self._gone[0]
            try:
                if client.returns:
                    self._jobs.attend([(client.response, client.name)], RETRIEVED_WITHIN)
                else:
                    self._jobs.abandon(client.response, client.name)
            except AWAY:
                raise
            except JobNotFound:
                pass
            except Exception:
                log.exception("that a client of %s has gone cannot be told", client.response)
            self._gone.popleft()

    def _run(self) -> None:
        due = time.monotonic() + RENEW_EVERY
        while not self._ended.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            try:
                self.tell_gone()
                if time.monotonic() >= due:
                    self.renew()
                    due = time.monotonic() + RENEW_EVERY
            except AWAY as error:
                log.warning("clients cannot be told of: %s; trying again", error)
                self._ended.wait(AGAIN_AFTER)
                self._wake.set()
            except Exception:
                log.exception("clients")
                due = time.monotonic() + RENEW_EVERY
        try:
            self.tell_gone()
        except AWAY as error:
            log.warning("clients that have gone are missed only later: %s", error)
