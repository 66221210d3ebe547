"""A hub of events for tests, which hears a real Redis."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from scheduler.api.stream import EventHub
from scheduler.redis_client import connect_async


@contextlib.asynccontextmanager
async def hub(url: str, patience: float = 0) -> AsyncIterator[EventHub]:
    client = connect_async(url, patience=patience)
    made = EventHub(client)
    made.start()
    try:
        yield made
    finally:
        await made.stop()
        await client.aclose()
