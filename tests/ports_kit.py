"""Ports that are chosen now and listened at later, which nobody else is given meanwhile."""

from __future__ import annotations

import itertools
import os
import secrets
import socket

_numbers = itertools.count(secrets.randbelow(800))


def own_port() -> int:
    """A free port of 127.0.0.1, another one each time, in each of the processes that test.

    It is below those that systems hand out to who asks for any port, and to who connects, and below
    those that the product chooses.
    """
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
    for number in itertools.islice(_numbers, 800):
        port = 10_000 + 800 * place + number % 800
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
