"""A user of Redis for the dashboard that can read RQ's keys and do nothing else."""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import Any, cast
from urllib.parse import quote, urlsplit, urlunsplit

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from rq.defaults import RQ_KEY_PREFIX

from scheduler.redis_client import connect

log = logging.getLogger("tandem.dashboard")

NAME = "tandem-dashboard"
_PASSWORD = "tandem:dashboard:password"
RULES = (
    "reset", "on", f"%R~{RQ_KEY_PREFIX}:*", "+@read", "+@connection", "-@dangerous", "-@admin",
    "-keys", "-scan", "-randomkey", "+info",
)  # fmt: skip
PATIENCE = 1.0


class ReadOnly:
    """Connections for the dashboard: as a user that may only read, where the server allows one.

    A server that was restarted has forgotten the user; it is then made again.
    """

    def __init__(self, url: str, admin: redis.Redis) -> None:
        """`url`: where the dashboard may look if no user can be made; `admin` tries to make one."""
        self._url = url
        self._admin = admin
        self._password = ""
        self._client: redis.Redis | None = None
        self.enforced = False
        """Whether Redis itself refuses to write for the dashboard."""

    def client(self) -> redis.Redis:
        """A connection that works now. Raises RedisError where the server is away."""
        if self._client is not None and self._works(self._client):
            return self._client
        self.enforced = self._make()
        self._client = connect(self._own_url() if self.enforced else self._url, patience=PATIENCE)
        return self._client

    def _works(self, client: redis.Redis) -> bool:
        try:
            client.ping()
        except (AuthenticationError, NoPermissionError):
            return False
        return True

    def _make(self) -> bool:
        """Create the user; False where this server or our own user does not allow it."""
        try:
            self._password = self._shared()
            rules: list[Any] = ["ACL", "SETUSER", NAME, *RULES, f">{self._password}"]
            self._admin.execute_command(*rules)  # type: ignore[no-untyped-call]
        except (NoPermissionError, ResponseError) as error:
            log.info(
                "Redis makes no read-only user for the dashboard (%s): it reads as it is "
                "configured to, and refuses by itself what would change anything",
                str(error)[:80],
            )
            return False
        return True

    def _shared(self) -> str:
        """The user's password: one for all our processes at this server, which the user itself
        cannot read."""
        self._admin.set(_PASSWORD, secrets.token_urlsafe(32), nx=True)
        return cast(bytes, self._admin.get(_PASSWORD)).decode()

    def _own_url(self) -> str:
        parts = urlsplit(self._url)
        place = parts.netloc.rpartition("@")[2]
        netloc = f"{NAME}:{quote(self._password, safe='')}@{place}"
        return urlunsplit(parts._replace(netloc=netloc))

    def close(self) -> None:
        """Close the connections; the user stays, unusable without its password."""
        if self._client is not None:
            with contextlib.suppress(RedisError):
                self._client.close()
