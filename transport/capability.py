"""Whether this machine can carry bulk data over rdma: the one place where that is decided."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from transport.sidecar import Fabric


class Choice(NamedTuple):
    """The fabric an rdma link would use, or None for tcp, and why."""

    fabric: Fabric | None
    reason: str


def choose(backend: str, devices: str) -> Choice:
    """What `link.backend` means here; `devices` is the path of the cable map.

    "auto" takes rdma only where a Mac has a cable map: whether it works then is tested when the
    link is formed. "rdma" elsewhere uses the ring backend, which speaks TCP and serves tests.
    """
    if backend == "tcp":
        return Choice(None, "link.backend is tcp")
    if sys.platform != "darwin":
        if backend == "rdma":
            return Choice("ring", "no RDMA on this system: the ring backend stands in for it")
        return Choice(None, "no RDMA over Thunderbolt on this system")
    if not devices:
        return Choice(None, "no cable map: link.devices is empty")
    if not Path(devices).expanduser().is_file():
        return Choice(None, f"the cable map {devices} does not exist: correct link.devices")
    return Choice("jaccl", f"cable map {devices}")
