"""Messages are heard as they were sent, whatever protocol an address asks for."""

from __future__ import annotations

import asyncio
import logging

import pytest

from scheduler.redis_client import connect, connect_async, subscription

DATA = bytes(range(256))


@pytest.mark.parametrize("protocol", ["", "2", "3"])
def test_messages_are_heard_and_heard_again_after_a_loss(
    redis_url: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "push_response")
    asked = f"{'&' if '?' in redis_url else '?'}protocol={protocol}" if protocol else ""

    async def run() -> None:
        client = connect_async(redis_url + asked)
        heard = subscription(client)

        async def next_of(kind: str) -> bytes:
            while True:
                message = await heard.get_message(timeout=1.0)
                if message is not None and message["type"] == kind:
                    data = message["data"]
                    return data if isinstance(data, bytes) else b""

        with connect(redis_url) as other:
            async with asyncio.timeout(60):
                await heard.subscribe("here")
                await next_of("subscribe")
                other.publish("here", DATA)
                assert await next_of("message") == DATA
                other.client_kill_filter(_type="pubsub")
                await next_of("subscribe")
                other.publish("here", DATA[::-1])
                assert await next_of("message") == DATA[::-1]
        await heard.aclose()  # type: ignore[no-untyped-call]  # redis has no types here
        await client.aclose()

    asyncio.run(run())
    # Others may warn of something meanwhile, of what earlier tests have left for instance.
    assert not [record for record in caplog.records if record.name == "push_response"]
