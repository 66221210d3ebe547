"""The receiving process of the link's benchmark.

Reads one JSON line (secret, largest size), answers with its ports, then obeys 9-byte orders on the
raw connection (kind, count of bytes) and answers each with one byte when the bytes are in memory.
"""

from __future__ import annotations

import json
import socket
import struct
import sys

from store.codec.header import Piece
from transport.epochs import Epochs
from transport.protocol import Offer
from transport.receiver import Receiver
from transport.sink import Grant, Refusal

ORDER = struct.Struct("<cQ")
RAW = b"r"
FILE = b"f"


class Arena:
    """A sink whose memory was allocated and touched before anything is measured."""

    def __init__(self, nbytes: int) -> None:
        self.memory = memoryview(bytearray(nbytes))
        for at in range(0, nbytes, 4096):
            self.memory[at] = 1
        self._at = 0

    def admit(self, offer: Offer) -> Grant | Refusal:
        self._at = 0
        return Grant(offer.nbytes)

    def buffer(self, transfer: str, nbytes: int) -> memoryview:
        start = self._at
        self._at += nbytes
        return self.memory[start : start + nbytes]

    def piece(self, transfer: str, piece: Piece) -> None:
        pass

    def done(self, transfer: str) -> None:
        pass

    def abort(self, transfer: str, reason: str) -> None:
        print(f"the benchmark's transfer was given up: {reason}", file=sys.stderr)


def read_exactly(sock: socket.socket, view: memoryview) -> bool:
    """Fill the view; False if the peer has closed."""
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if got == 0:
            return False
        done += got
    return True


def main() -> None:
    """Serve one benchmark until its raw connection closes."""
    setting = json.loads(sys.stdin.readline())
    arena = Arena(setting["nbytes"])
    listener = socket.create_server(("127.0.0.1", 0))
    epochs = _epochs(setting["redis"]) if setting["redis"] else None
    secret = bytes.fromhex(setting["secret"])
    receiver = Receiver("127.0.0.1", 0, secret, arena, 20.0, epochs=epochs)
    print(json.dumps({"raw": listener.getsockname()[1], "link": receiver.address[1]}), flush=True)
    listener.settimeout(20)
    sock, _ = listener.accept()
    sock.settimeout(60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    order = memoryview(bytearray(ORDER.size))
    try:
        while read_exactly(sock, order):
            kind, nbytes = ORDER.unpack(order)
            if kind == RAW:
                read_exactly(sock, arena.memory[:nbytes])
            elif kind == FILE:
                from safetensors.numpy import load_file

                load_file(setting["file"])
            sock.sendall(b"k")
    finally:
        sock.close()
        listener.close()
        receiver.close()
        if epochs is not None:
            epochs.stop()


def _epochs(url: str) -> Epochs:
    import redis

    epochs = Epochs(redis.Redis.from_url(url), "bench-receiver")
    epochs.start()
    return epochs


if __name__ == "__main__":
    main()
