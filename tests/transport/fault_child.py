"""The link's child process with a fault in it: `fault_child.py FAULT SOCKET [SLOT]`.

SOCKET is empty, or a path over which the ranks exchange sizes: ring then has JACCL's semantics. The
fault strikes at the sender's second batch; where FAULT is a path, once, at the first batch for
which there is a file there, which holds its name. SLOT is the size of a batch in bytes.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transport import batch

if sys.argv[3:4] and sys.argv[3].isdigit():
    batch.SLOT = int(sys.argv[3])

from transport import child
from transport.batch import Batch, padded

fault, path = sys.argv[1], sys.argv[2]
trigger = Path(fault) if fault.startswith("/") else None


def due(sequence: int) -> str:
    """The fault to commit with this batch, or none."""
    if trigger is None:
        return fault if sequence == 2 else "none"
    try:
        found = trigger.read_text()
        trigger.unlink()
    except OSError:
        return "none"
    return found or "none"


class FaultyGroup(child.Group):
    """Sends as the fault says."""

    def send(self, body: memoryview, sequence: int) -> None:
        fault = due(sequence) if sequence else "none"
        if fault == "none":
            super().send(body, sequence)
        elif fault == "die":
            os._exit(9)
        elif fault == "stall":
            time.sleep(600)
        elif fault == "corrupt":
            body[len(body) // 2] ^= 1
            super().send(body, sequence)
        elif fault == "duplicate":
            super().send(body, sequence)
            super().send(body, sequence)
        elif fault == "reorder":
            super().send(body, sequence + 1)
        elif fault == "header":
            damaged = bytearray(self._header(body, sequence).pack())
            damaged[30] ^= 1
            self._raw(bytes(damaged), body)
        elif fault == "epoch":
            header = replace(self._header(body, sequence), epoch=self.epoch - 1)
            self._raw(header.pack(), body)
        elif fault == "short":
            self._raw(replace(self._header(body, sequence), nbytes=len(body) - 1).pack(), body)
        elif fault == "long":
            longer = len(body) + 600_000
            self._raw(replace(self._header(body, sequence), nbytes=longer).pack(), body)

    def _header(self, body: memoryview, sequence: int) -> Batch:
        return Batch(self.epoch, sequence, len(body), self.nonce)

    def _raw(self, header: bytes, body: memoryview) -> None:
        self._send(header)
        size = padded(len(body))
        self._view[: len(body)] = body
        array: Any = self._stage[:size]
        self._op(self._mx.distributed.send(array, 1 - self.rank, group=self._group))


if path:
    sys.path.insert(0, str(Path(__file__).parent))
    import jaccl_semantics

    jaccl_semantics.install(path)
child.Group = FaultyGroup  # type: ignore[misc]
child.main()
