"""Ports that are chosen now and listened at later, which nobody else is given meanwhile."""

from __future__ import annotations

import itertools
import os
import secrets
import socket

_numbers = itertools.count(secrets.randbelow(1000))


def own_port() -> int:
    """A free port of 127.0.0.1, another one each time, in each of the processes that test.

    It is below those that systems hand out to who asks for any port, and to who connects.
    """
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    for number in itertools.islice(_numbers, 1000):
        port = 20_000 + 1000 * place + number % 1000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
