"""Sender and receiver on two hosts: network namespaces joined by a cable that can be cut."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from link_parts import LONG, Peer

DEADLINE = 3.0
"""For who is found out by it, once a link has been formed; between sound ends it is LONG."""
STATE_BYTES = 1000 + 10 * 200_000 + 1_500_000


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@dataclass
class Cable:
    """A veth pair between two namespaces; 10.77.0.1 is the receiver's end."""

    ends: tuple[str, str]
    peers: list[Peer] = field(default_factory=list)

    def shape(self, rate: str, delay: str = "") -> None:
        """Limit both directions; a delay needs netem."""
        for end in self.ends:
            inside = ("ip", "netns", "exec", end, "tc", "qdisc", "replace", "dev", "cable", "root")
            if delay:
                run(*inside, "netem", "delay", delay, "rate", rate)
            else:
                run(*inside, "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")

    def cut(self) -> None:
        run("ip", "-n", self.ends[1], "link", "set", "cable", "down")

    def mend(self) -> None:
        run("ip", "-n", self.ends[1], "link", "set", "cable", "up")

    def start(self, end: int, role: str, *arguments: object) -> Peer:
        peer = Peer(
            role,
            *arguments,
            program="link_netns_peer.py",
            prefix=("ip", "netns", "exec", self.ends[end]),
        )
        self.peers.append(peer)
        return peer


@pytest.fixture
def cable() -> Iterator[Cable]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    name = f"tdm{secrets.token_hex(3)}"
    ends = (f"{name}a", f"{name}b")
    made = []
    cable = Cable(ends)
    try:
        try:
            for end in ends:
                run("ip", "netns", "add", end)
                made.append(end)
            run(
                *("ip", "link", "add", "cable", "netns", ends[0], "type", "veth"),
                *("peer", "name", "cable", "netns", ends[1]),
            )
            for i, end in enumerate(ends):
                run("ip", "-n", end, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
                run("ip", "-n", end, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield cable
    finally:
        for peer in cable.peers:
            peer.close()
        for end in made:
            run("ip", "netns", "del", end)


def ends(cable: Cable, deadline: float = DEADLINE) -> tuple[Peer, Peer]:
    receiver = cable.start(0, "receive", "10.77.0.1", deadline)
    port = receiver.line()
    return receiver, cable.start(1, "send", "10.77.0.1", deadline, port)


def test_a_state_crosses_a_real_cable(cable: Cable) -> None:
    cable.shape("800mbit")
    receiver, sender = ends(cable, LONG)
    sender.say("1")
    assert receiver.line() == "moving"
    assert receiver.line() == "whole"
    assert sender.line() == f"delivered {STATE_BYTES}"


def test_a_state_crosses_a_cable_with_delay(cable: Cable) -> None:
    try:
        cable.shape("400mbit", delay="8ms")
    except subprocess.CalledProcessError:
        pytest.skip("this kernel has no netem, so a delay cannot be made")
    receiver, sender = ends(cable, LONG)
    sender.say("1")
    assert receiver.line() == "moving"
    assert receiver.line() == "whole"
    assert sender.line() == f"delivered {STATE_BYTES}"


def test_a_cut_cable_is_noticed_by_both_ends_and_mended(cable: Cable) -> None:
    cable.shape("10mbit")  # it takes nearly as long as a deadline
    receiver, sender = ends(cable)
    receiver.say("hold")  # however long it takes to cut the cable
    assert receiver.line() == "held"
    sender.say("hasty 1")
    assert receiver.line() == "moving"
    cable.cut()
    receiver.say("go")
    assert sender.line() == "failed: lost"
    assert receiver.line() == "aborted"
    sender.say("cut 2")
    assert sender.line() == "no link: lost"
    cable.mend()
    cable.shape("800mbit")
    sender.say("3")
    assert receiver.line() == "moving"
    assert receiver.line() == "whole"
    assert sender.line() == f"delivered {STATE_BYTES}"


def test_a_state_is_lent_over_the_cable_and_a_cut_ends_the_loan(cable: Cable) -> None:
    cable.shape("2mbit")  # long enough for whoever is slow in cutting the cable
    _, sender = ends(cable)
    sender.say("hold")
    assert sender.line() == "held"
    sender.say("hasty ask 1")
    assert sender.line() == "moving"
    cable.cut()
    sender.say("go")
    assert sender.line() == "aborted"
    cable.mend()
    cable.shape("800mbit")
    sender.say("ask 2")
    assert sender.line() == "moving"
    assert sender.line() == "whole"


def test_a_cable_that_is_too_slow_is_given_up(cable: Cable) -> None:
    cable.shape("2mbit")
    receiver, sender = ends(cable)
    sender.say("hasty 1")
    assert receiver.line() == "moving"
    assert sender.line() == "failed: lost"
    assert receiver.line() == "aborted"
    cable.shape("800mbit")
    sender.say("2")
    assert receiver.line() == "moving"
    assert receiver.line() == "whole"
    assert sender.line() == f"delivered {STATE_BYTES}"
