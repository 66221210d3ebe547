"""Bulk data through a child process that holds a two-rank group; control stays on TCP.

Parts are gathered into batches of one shared-memory slot, so that many small pieces cost few
operations. Data flows one way, and a receive is posted only when the sender has said that a batch
is coming (Burst): a waiting receive burns a core.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from transport import auth, versions
from transport.batch import SLOT, SLOTS
from transport.control import Control
from transport.epochs import Epochs
from transport.errors import LinkError
from transport.frame import SIZE, Frame
from transport.protocol import Burst, Form, Formed, Meet, Ping
from transport.sender import Address, Sender, greet, join
from transport.sidecar import COMMAND, FORM_SECONDS, Fabric, Plan, Sidecar, free_port
from transport.wire import FLOOR, Connection

if TYPE_CHECKING:
    from transport.session import Session

TICK = 0.2


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
) -> Sender:
    """Form an rdma link to the Receiver at `address`: a fresh epoch, nonce and ports.

    `host` is this node's own address for a ring, `devices` the path of the cable map for JACCL.
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
        way = BatchWriter(sidecar, epochs, theirs.node, deadline)
        try:
            epochs.up(epochs.node, theirs.node, epoch)
            return Sender(control, [way], theirs, deadline, path="rdma")
        except BaseException:
            sidecar.close()
            raise
    except BaseException:
        for connection in made:
            connection.close()
        raise


def _form(control: Control, plan: Plan, host: str, deadline: float) -> Sidecar:
    """Both children started, the group up on both ends."""
    own = f"{host}:{free_port(host)}" if plan.fabric == "ring" else ""
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


class BatchWriter:
    """The sender's way: fills slots and lets the child send them."""

    def __init__(self, sidecar: Sidecar, epochs: Epochs, receiver: str, deadline: float) -> None:
        self.sidecar = sidecar
        self._epochs = epochs
        self._receiver = receiver
        self._patience = deadline + SLOT / FLOOR
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(SLOTS):
            self._free.put(slot)
        self._lock = threading.Lock()
        self._flying = 0
        self._moved = time.monotonic()
        self._ended = threading.Event()

    def run(self, sender: Sender) -> None:
        """Gather parts into slots until the link ends."""
        collector = threading.Thread(
            target=self._collect, args=(sender,), name="link-collect", daemon=True
        )
        collector.start()
        try:
            self._fill(sender)
        finally:
            self._ended.set()
            self.sidecar.kill()
            collector.join(10)

    def _fill(self, sender: Sender) -> None:
        sequence = 1
        part = sender.next_part()
        while part is not None:
            slot = self._take(sender)
            if slot is None:
                return
            filled = 0
            with self.sidecar.slot(slot) as memory:
                while part is not None and filled + len(part.head) + len(part.payload) <= SLOT:
                    middle = filled + len(part.head)
                    memory[filled:middle] = part.head
                    filled = middle + len(part.payload)
                    memory[middle:filled] = part.payload
                    sender.written(part)
                    part = sender.next_part(wait=False)
            with self._lock:
                if self._flying == 0:
                    self._moved = time.monotonic()
                self._flying += 1
            sender.tell(Burst(1))
            self.sidecar.send(slot, filled, sequence)
            sequence += 1
            if part is None:
                part = sender.next_part()

    def _take(self, sender: Sender) -> int | None:
        while sender.alive:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=TICK)
        return None

    def _collect(self, sender: Sender) -> None:
        """Take the child's events; notice its death, and a batch that does not move."""
        try:
            while not self._ended.is_set():
                event = self.sidecar.poll(TICK)
                with self._lock:
                    now = time.monotonic()
                    if event is not None:
                        self._flying -= 1
                        self._moved = now
                    stalled = self._flying > 0 and now - self._moved > self._patience
                if event is not None:
                    self._free.put(int(event["slot"]))
                if stalled:
                    raise LinkError("rdma link: a batch does not move; peer frozen or cut off")
        except LinkError as error:
            if sender.alive:
                sender.fail(error)
                epoch = self.sidecar.plan.epoch
                with contextlib.suppress(LinkError):
                    self._epochs.over(self._epochs.node, self._receiver, epoch, str(error))

    def kill(self) -> None:
        """Wake `run`; the child is killed."""
        self._ended.set()
        self.sidecar.kill()

    def close(self) -> None:
        """Release the child's memory and pipes."""
        self.sidecar.close()


class BatchReader:
    """The receiver's end: posts receives as they are announced and feeds frames to a session."""

    def __init__(self, sidecar: Sidecar, session: Session, deadline: float) -> None:
        self.sidecar = sidecar
        self._session = session
        self._patience = deadline + SLOT / FLOOR
        self._lock = threading.Lock()
        self._free = list(range(SLOTS))
        self._due = 0
        self._posted = 0
        self._moved = time.monotonic()

    def announce(self, count: int) -> None:
        """So many batches are coming."""
        with self._lock:
            self._due += count
            if self._due > 1 << 16:
                raise LinkError("more batches announced than can ever be due", "protocol")
        self._post()

    def _post(self) -> None:
        with self._lock:
            while self._due and self._free:
                if self._posted == 0:
                    self._moved = time.monotonic()
                self._due -= 1
                self._posted += 1
                self.sidecar.receive(self._free.pop())

    def run(self) -> None:
        """Take batches until the link ends; raises LinkError then."""
        expected = 1
        while True:
            event = self.sidecar.poll(TICK)
            now = time.monotonic()
            if event is None:
                with self._lock:
                    stalled = self._posted > 0 and now - self._moved > self._patience
                if stalled:
                    raise LinkError("rdma link: an announced batch does not come")
                continue
            if event["sequence"] != expected:
                raise LinkError("rdma link: batches are out of order", "protocol")
            expected += 1
            slot = int(event["slot"])
            with self.sidecar.slot(slot) as memory, memory[: int(event["nbytes"])] as body:
                self._frames(body)
            with self._lock:
                self._posted -= 1
                self._moved = now
                self._free.append(slot)
            self._post()

    def _frames(self, body: memoryview) -> None:
        at = 0
        while at < len(body):
            frame = Frame.unpack(body[at : at + SIZE])
            middle = at + SIZE + frame.header
            end = middle + frame.length
            if end > len(body):
                raise LinkError("a frame reaches beyond its batch", "protocol")
            header = bytes(body[at + SIZE : middle])
            with body[middle:end] as payload:
                self._session.take(frame, header, payload)
            at = end
