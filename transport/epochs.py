"""Epochs of rdma links in Redis: who may form one, which one is valid, who is alive.

A link is named `<sender node>:<receiver node>`. Its record holds the epoch, the nonce and the boot
ids of both ends; every change of it is one run of one script, which refuses whoever is not the
process that is alive under the node's name, or speaks of an epoch that is over.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Any, Literal

import redis

from transport.errors import LinkError

BEAT_SECONDS = 4.0
State = Literal["none", "forming", "up", "over"]

SCRIPT = """
local link, sender, receiver = KEYS[1], KEYS[2], KEYS[3]
local op = ARGV[1]
if op == 'form' then
  -- sender boot, receiver boot, nonce
  if redis.call('GET', sender) ~= ARGV[2] then return {0, 'the sender is not alive here'} end
  if redis.call('GET', receiver) ~= ARGV[3] then return {0, 'the receiver is not alive'} end
  local epoch = redis.call('HINCRBY', link, 'epoch', 1)
  redis.call('HSET', link, 'state', 'forming', 'nonce', ARGV[4], 'sender', ARGV[2],
             'receiver', ARGV[3], 'ups', 0, 'reason', '')
  return {epoch, ''}
end
local epoch = redis.call('HGET', link, 'epoch')
if not epoch or epoch ~= ARGV[2] then return {0, 'epoch ' .. ARGV[2] .. ' is over'} end
if op == 'join' then
  -- epoch, nonce, receiver boot
  local held = redis.call('HMGET', link, 'state', 'nonce', 'receiver')
  if held[1] ~= 'forming' or held[2] ~= ARGV[3] or held[3] ~= ARGV[4] then
    return {0, 'this is not the epoch that is being formed'}
  end
elseif op == 'up' then
  if redis.call('HGET', link, 'state') == 'over' then return {0, 'the epoch is over'} end
  if redis.call('HINCRBY', link, 'ups', 1) >= 2 then redis.call('HSET', link, 'state', 'up') end
elseif op == 'over' then
  -- epoch, reason
  redis.call('HSET', link, 'state', 'over', 'reason', ARGV[3])
end
return {tonumber(epoch), ''}
"""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """What Redis holds about one link."""

    epoch: int
    state: State
    reason: str


class Epochs:
    """One process's view of the links it takes part in, and its sign of life.

    `node` is this node's name; the boot id is drawn anew for every object. `beat` is to be called
    by the owner's heartbeat, at least every BEAT_SECONDS / 2, from a thread that never waits for
    mlx; `start` does so from a thread of its own.
    """

    def __init__(self, client: redis.Redis, node: str, url: str = "") -> None:
        self.node = node
        self.url = url
        self.boot = secrets.token_hex(16)
        self._client = client
        self._script = client.register_script(SCRIPT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.beat()

    def beat(self) -> None:
        """Say that this boot is alive."""
        self._call(
            lambda: self._client.set(_alive(self.node), self.boot, px=int(BEAT_SECONDS * 1000))
        )

    def start(self) -> None:
        """Beat in the background until `stop`."""
        self._thread = threading.Thread(target=self._run, name="link-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the background beat."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def form(self, receiver: str, receiver_boot: str, nonce: bytes) -> int:
        """A fresh epoch of the link from this node to `receiver`; raises LinkError."""
        return self._run_script(self.node, receiver, "form", self.boot, receiver_boot, nonce.hex())

    def join(self, sender: str, epoch: int, nonce: bytes) -> None:
        """Check, as the receiver, that this epoch is the one being formed; raises LinkError."""
        self._run_script(sender, self.node, "join", epoch, nonce.hex(), self.boot)

    def up(self, sender: str, receiver: str, epoch: int) -> None:
        """One side's group stands; raises LinkError if the epoch is over."""
        self._run_script(sender, receiver, "up", epoch)

    def over(self, sender: str, receiver: str, epoch: int, reason: str) -> bool:
        """Mark the epoch as over; False if another epoch has begun already."""
        try:
            self._run_script(sender, receiver, "over", epoch, reason[:200])
        except LinkError:
            return False
        return True

    def record(self, sender: str, receiver: str) -> LinkRecord:
        """The link's record; raises LinkError if Redis does not answer."""
        held: dict[bytes, bytes] = self._call(lambda: self._client.hgetall(_key(sender, receiver)))
        text = {_text(key): _text(value) for key, value in held.items()}
        state: Any = text.get("state", "none")
        return LinkRecord(int(text.get("epoch", 0)), state, text.get("reason", ""))

    def _run_script(self, sender: str, receiver: str, *arguments: object) -> int:
        keys = [_key(sender, receiver), _alive(sender), _alive(receiver)]
        epoch, refusal = self._call(lambda: self._script(keys, [str(each) for each in arguments]))
        if not epoch:
            raise LinkError(f"link {sender} to {receiver}: {_text(refusal)}", "stale")
        return int(epoch)

    def _call(self, work: Any) -> Any:
        try:
            return work()
        except redis.RedisError as error:
            raise LinkError(f"Redis does not answer about the link: {error}") from None

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS / 4):
            try:
                self.beat()
            except LinkError:
                continue  # the boot's sign of life lapses, and no epoch forms: that is the point


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _key(sender: str, receiver: str) -> str:
    return f"tandem:link:{sender}:{receiver}"


def _alive(node: str) -> str:
    return f"tandem:link:alive:{node}"
