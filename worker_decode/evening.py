"""While this node's store is fuller than it should be, what is idle goes where there is room."""

from __future__ import annotations

import logging
import threading

import redis

from scheduler.balancing import Balancing, Done
from store.errors import StoreError

log = logging.getLogger("tandem.decode")
EVERY = 60.0
LIMIT = 4_000_000_000
"""Bytes that are moved from one look to the next."""
IDLE = 600.0
"""Only what nobody has used for so many seconds moves by itself."""


class Evening:
    """Looks now and then, on a thread of its own; see scheduler.balance."""

    def __init__(
        self,
        client: redis.Redis,
        node: str,
        above: float,
        *,
        every: float = EVERY,
        limit: int = LIMIT,
        idle: float = IDLE,
    ) -> None:
        """For decode node `node`, while more than `above` (a share) of its store is in use.
        `client` is a connection of its own."""
        self._client, self._node, self._every = client, node, every
        self._work = Balancing(client, limit=limit, above=above, idle=idle)
        self._stopped = threading.Event()
        self._trouble = ""
        self._away: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="evening", daemon=True)
        self._thread.start()

    def look(self) -> int:
        """Move what should move now; how many did. Raises StoreError, and what Redis raises."""
        moved: list[Done] = []
        holders, away = self._work.holders(), self._work.away
        if self._node in away:
            raise StoreError(f"{self._node} cannot be asked: {away[self._node]}")
        for name in sorted(away.keys() - self._away.keys()):  # once: it may last for days
            log.warning("decode node %s is given nothing: %s", name, away[name])
        self._away = dict(away)
        moves = self._work.plan(holders, self._node)
        self._work.run(
            moves,
            lambda done: moved.append(done) if done.moved is not None else None,
            self._stopped.is_set,
        )
        if moved:
            log.info("%d idle conversations went to nodes with more room", len(moved))
        return len(moved)

    def close(self) -> None:
        """Look no more; waits for the conversation that is on its way, but not for long."""
        self._stopped.set()
        self._thread.join(30.0)
        self._client.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            try:
                self.look()
                self._trouble = ""
            except Exception as error:
                if str(error) != self._trouble:  # once: it may last for days
                    log.warning("stores are not evened out: %s", error)
                self._trouble = str(error)
