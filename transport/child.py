"""The child process of an rdma link: the only process that holds an mx.distributed group.

Started by `sidecar.Sidecar` with one JSON line of settings, then one command a line. It ends by
itself on any error and when its parent's pipe closes; whoever is blocked in an operation cannot be
woken, so its parent kills it. Sends and receives are never in flight together.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any

from transport.batch import SIZE as HEADER
from transport.batch import SLOT, SLOTS, Batch, padded
from transport.errors import LinkError
from transport.shared import SharedMemory


def say(**event: object) -> None:
    """One event line to the parent."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Group:
    """A two-rank group and the operations on it. Imports mlx when made."""

    def __init__(self, setting: dict[str, Any]) -> None:
        import mlx.core as mx

        self._mx = mx
        mx.set_default_device(mx.cpu)
        mx.set_cache_limit(4 * SLOT)
        self.rank = int(setting["rank"])
        self.epoch = int(setting["epoch"])
        self.nonce = bytes.fromhex(setting["nonce"])
        # init blocks without a deadline and without releasing the interpreter: only a signal with
        # its default action ends it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(setting["deadline"]))
        self._group = mx.distributed.init(
            strict=True, backend=setting["fabric"], **_channel(setting)
        )
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._group.size() != 2:
            raise LinkError("the group does not have two members", "protocol")
        self._stage: Any = mx.zeros((SLOT,), dtype=mx.uint8)
        mx.eval(self._stage)
        self._view = _bytes(self._stage)

    def send(self, body: memoryview, sequence: int) -> None:
        """One batch: header, then the body padded."""
        size = padded(len(body))
        self._send(Batch(self.epoch, sequence, len(body), self.nonce).pack())
        self._view[: len(body)] = body
        self._op(self._mx.distributed.send(self._stage[:size], 1 - self.rank, group=self._group))

    def receive(self, slot: memoryview) -> Batch:
        """One batch into the slot; checked against this epoch before the body is accepted."""
        header = Batch.unpack(self._receive(HEADER))
        if (header.epoch, header.nonce) != (self.epoch, self.nonce):
            raise LinkError("a batch of another epoch", "protocol")
        slot[: header.nbytes] = self._receive(padded(header.nbytes))[: header.nbytes]
        return header

    def hello(self) -> None:
        """Prove that the other member is the one that was meant, and that bytes arrive right."""
        probe = bytes(range(256)) * 16
        for turn in (0, 1):
            if turn == self.rank:
                self.send(memoryview(probe), 0)
            else:
                slot = memoryview(bytearray(SLOT))
                if bytes(slot[: self.receive(slot).nbytes]) != probe:
                    raise LinkError("the self-test's bytes arrived changed", "corrupt")

    def _op(self, array: Any) -> None:
        # Always evaluated here and at once: an asynchronous error would surface elsewhere.
        self._mx.eval(array)

    def _send(self, data: bytes) -> None:
        array = self._mx.array(list(data), dtype=self._mx.uint8)
        self._op(self._mx.distributed.send(array, 1 - self.rank, group=self._group))

    def _receive(self, nbytes: int) -> memoryview:
        array: Any = self._mx.distributed.recv(
            (nbytes,), self._mx.uint8, 1 - self.rank, group=self._group
        )
        self._op(array)
        return _bytes(array)


def _bytes(array: Any) -> memoryview:
    return memoryview(array)


def _channel(setting: dict[str, Any]) -> dict[str, Any]:
    """JACCL's ranks meet over Redis; ring's over the addresses in its host file."""
    if setting["fabric"] != "jaccl":
        return {}
    from transport.rendezvous import side_channel

    return {"all_gather_factory": side_channel(setting)}


def serve(group: Group, memory: SharedMemory, commands: queue.Queue[dict[str, Any]]) -> None:
    """Obey commands until the process ends."""
    slots = [memory.view[i * SLOT : (i + 1) * SLOT] for i in range(SLOTS)]
    while True:
        command = commands.get()
        slot = int(command["slot"])
        if command["op"] == "send":
            group.send(slots[slot][: command["nbytes"]], command["sequence"])
            say(event="sent", slot=slot)
        else:
            header = group.receive(slots[slot])
            say(event="got", slot=slot, nbytes=header.nbytes, sequence=header.sequence)


def _listen(commands: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(0)  # the parent is gone, or wants this link no more


def main() -> None:
    """Form the group, report it, and serve."""
    setting = json.loads(sys.stdin.readline())
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    try:
        memory = SharedMemory.attach(int(setting["fd"]), SLOT * SLOTS)
        group = Group(setting)
        threading.Thread(target=_listen, args=(commands,), daemon=True).start()
        group.hello()
        say(event="up")
        serve(group, memory, commands)
    except Exception as error:
        say(event="error", reason=f"{type(error).__name__}: {error}"[:400])
        sys.stdout.flush()
        os._exit(1)  # a broken group may hang in its destructor


if __name__ == "__main__":
    main()
