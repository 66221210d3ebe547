"""What images become in a prompt, asked of a child process that has the model's processor."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from scheduler.images import ImageError

SECONDS = 120.0
"""Longest wait for the child: its first answer includes the loading of libraries."""
KNOWN = 256
"""Images whose token ids are remembered."""


class ExpanderGone(Exception):
    """The child process did not answer; the next request starts a new one."""


class Expander:
    """Starts its child with the first image. Thread-safe; one image at a time."""

    def __init__(self, model_dir: Path) -> None:
        self._command = [sys.executable, "-P", "-m", "engine.expander", str(model_dir)]
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()
        self._token: int | None = None

    @property
    def image_token(self) -> int:
        """The id of the token that stands for an image in a rendered prompt.

        Raises ImageError where the model takes no images, ExpanderGone.
        """
        with self._lock:
            self._start()
            assert self._token is not None
            return self._token

    def ids(self, data: bytes) -> list[int]:
        """The token ids that replace one image's token. Raises ImageError, ExpanderGone."""
        key = hashlib.blake2b(data, digest_size=16).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            self._start()
            assert self._child is not None
            assert self._child.stdin is not None
            line = json.dumps({"image": base64.b64encode(data).decode()})
            try:
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
            except OSError as error:
                self._end()
                raise ExpanderGone(str(error)) from error
            found = [int(token) for token in self._answer()["ids"]]
            self._known[key] = found
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
            return found

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        self._end()
        self._lines = queue.Queue()
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(
            target=_read, args=(self._child, self._lines), name="tandem-images", daemon=True
        ).start()
        self._token = int(self._answer()["image_token"])

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=SECONDS)
        except queue.Empty:
            line = ""
        if not line:
            self._end()
            raise ExpanderGone("the process that reads images has ended or hangs")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ImageError(str(found["error"]))
        return found

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.kill()
        child.wait()


def _read(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert child.stdout is not None
    with contextlib.suppress(ValueError, OSError):  # closed meanwhile
        for line in child.stdout:
            lines.put(line)
    lines.put("")
