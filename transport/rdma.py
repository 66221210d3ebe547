"""Forming an rdma link: control over TCP, bulk data through child processes (see `exchange`)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from transport import auth, versions
from transport.control import Control
from transport.desk import Desk
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.exchange import Exchange
from transport.protocol import Form, Formed, Meet, Ping
from transport.sender import Address, Sender, greet, join
from transport.sidecar import COMMAND, FORM_SECONDS, Fabric, Plan, Sidecar, ring_address
from transport.wire import Connection


def connect(
    address: Address,
    secret: bytes,
    epochs: Epochs,
    deadline: float = 10.0,
    *,
    fabric: Fabric = "jaccl",
    devices: str = "",
    host: str = "127.0.0.1",
    command: Sequence[str] = COMMAND,
    desk: Desk | None = None,
) -> Sender:
    """Form an rdma link to the Receiver at `address`: a fresh epoch, nonce and ports.

    `host` is this node's own address for a ring, `devices` the path of the cable map for JACCL,
    `desk` where states come in that are asked for.
    Raises LinkError; the epoch is then marked as over.
    """
    auth.check_secret(secret)
    link = secrets.token_bytes(16)
    made: list[Connection] = []
    try:
        control = Control(join(made, address, secret, auth.CONTROL, 0, link, deadline))
        mine = versions.hello(epochs.node, epochs.boot)
        theirs = greet(control, mine)
        versions.compare_rdma(mine, theirs)
        nonce = secrets.token_bytes(16)
        epoch = epochs.form(theirs.node, theirs.boot, nonce)
        try:
            plan = Plan(
                fabric,
                1,  # the receiver's child starts first and is rank 0, which listens first
                epoch,
                nonce,
                devices=devices,
                redis_url=epochs.url,
                link=f"{epochs.node}:{theirs.node}",
                command=command,
            )
            sidecar = _form(control, plan, host, deadline)
        except LinkError as error:
            epochs.over(epochs.node, theirs.node, epoch, str(error))
            raise

        def over(reason: str) -> None:
            with contextlib.suppress(LinkError):
                epochs.over(epochs.node, theirs.node, epoch, reason)

        way = Exchange(sidecar, deadline, leads=True, over=over)
        try:
            epochs.up(epochs.node, theirs.node, epoch)
            return Sender(control, [way], theirs, deadline, path="rdma", desk=desk)
        except BaseException:
            sidecar.close()
            raise
    except BaseException:
        for connection in made:
            connection.close()
        raise


def _form(control: Control, plan: Plan, host: str, deadline: float) -> Sidecar:
    """Both children started, the group up on both ends."""
    own = ring_address(host) if plan.fabric == "ring" else ""
    control.send(Form(plan.epoch, plan.nonce, plan.fabric, own))
    meet = control.receive()
    if not isinstance(meet, Meet) or meet.epoch != plan.epoch:
        raise LinkError(f"expected a meeting place, got {meet}", "protocol")
    sidecar = Sidecar(replace(plan, hosts=(meet.host, own)))
    try:
        _await_group(control, sidecar, plan.epoch, deadline)
        return sidecar
    except BaseException:
        sidecar.close()
        raise


def _await_group(control: Control, sidecar: Sidecar, epoch: int, deadline: float) -> None:
    """Until both children have tested the group; the control connection is kept alive meanwhile."""
    limit = time.monotonic() + FORM_SECONDS
    pinged = 0.0
    mine = theirs = False
    while not (mine and theirs):
        now = time.monotonic()
        if now > limit:
            raise LinkError(f"rdma link: no group within {FORM_SECONDS:g} s")
        if now - pinged >= deadline / 4:
            pinged = now
            control.send(Ping(0))
        message = control.poll(0.05)
        if isinstance(message, Formed) and message.epoch == epoch:
            theirs = True
        elif message is not None and not isinstance(message, Ping):
            raise LinkError(f"expected a formed group, got {message}", "protocol")
        event = sidecar.poll(0.0 if mine else 0.05)
        if event is not None:
            mine = event.get("event") == "up"
