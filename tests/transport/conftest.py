"""What all tests of the link need: ends that are sound have time, and ports that are theirs."""

from __future__ import annotations

from functools import partial

import pytest
from ports_kit import own_port

from transport import rdma, receiver, session, sidecar
from transport.sidecar import Sidecar

FORM_SECONDS = 90.0
"""For two processes to start and to meet; what is not to meet is ended by something else."""


@pytest.fixture(autouse=True)
def _time_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls is no fault of whoever shakes hands or forms a group meanwhile."""
    monkeypatch.setattr(receiver, "HANDSHAKE_SECONDS", FORM_SECONDS)
    monkeypatch.setattr(rdma, "FORM_SECONDS", FORM_SECONDS)
    for module in (rdma, session):
        monkeypatch.setattr(module, "Sidecar", partial(Sidecar, form_seconds=FORM_SECONDS))
    monkeypatch.setattr(sidecar, "free_port", lambda host: own_port())
