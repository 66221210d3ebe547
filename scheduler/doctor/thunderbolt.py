"""Thunderbolt: RDMA, ports, cables and addresses, from what the system's commands print.

A port of `system_profiler` has a domain of its own, and names the domain of the Mac at the other
end of its cable. The same two domains, seen from both machines, are one cable: that tells crossed
maps from straight ones without a byte on the wire.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scheduler.doctor.capture import Output
from scheduler.doctor.finding import Check, fail, ok, skip, warn

RECOVERY = "start into Recovery, open a Terminal, run `rdma_ctl enable`, restart"


@dataclass(frozen=True)
class Port:
    """One receptacle: its interface, its domain, that of the Mac it is joined to, the link."""

    receptacle: int
    interface: str
    domain: str
    peer: str
    device: str
    connected: bool
    speed: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def interfaces(sample: Output | None) -> dict[int, str]:
    """Interface by receptacle, from `networksetup -listallhardwareports`."""
    found = re.findall(
        r"Hardware Port: Thunderbolt (\d+)\s*\nDevice: (\w+)", sample.text if sample else ""
    )
    return {int(number): device for number, device in found}


def ports(sample: Output | None, hardware: Output | None) -> list[Port] | None:
    """The receptacles in order; None where the output is not what system_profiler prints."""
    if sample is None:
        return None
    try:
        buses = json.loads(sample.text)["SPThunderboltDataType"]
        names = interfaces(hardware)
        found = []
        for bus in buses:
            tag = bus.get("receptacle_1_tag") or {}
            number = int(tag.get("receptacle_id_key", 0))
            # Only what hangs on the cable itself: a Mac behind a dock is not joined to us.
            items = [item for item in bus.get("_items") or () if item.get("domain_uuid_key")]
            found.append(
                Port(
                    receptacle=number,
                    interface=names.get(number, ""),
                    domain=str(bus.get("domain_uuid_key", "")).upper(),
                    peer=str(items[0]["domain_uuid_key"]).upper() if items else "",
                    device=str(items[0].get("device_name_key", "")) if items else "",
                    connected="no_devices" not in tag.get("receptacle_status_key", "no_devices"),
                    speed=str(tag.get("current_speed_key", "")),
                )
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return sorted(found, key=lambda port: port.receptacle)


def rdma(sample: Output | None) -> Check:
    """`rdma`: whether it was enabled in Recovery."""
    name = "rdma"
    if sample is None:
        return warn(
            name,
            "this macOS has no rdma_ctl; the link speaks TCP",
            "rdma_ctl is missing",
            "update to macOS 26.3 or newer for RDMA",
        )
    text = sample.text.strip().lower()
    if "disabled" in text or "not enabled" in text:
        return warn(
            name, "RDMA is disabled; the link speaks TCP", f"rdma_ctl: {sample.last}", RECOVERY
        )
    if "enabled" in text:
        return ok(name, "enabled", f"rdma_ctl: {sample.last}")
    return warn(name, "whether RDMA is enabled could not be read", sample.last, RECOVERY)


def devices(sample: Output | None) -> dict[str, str] | None:
    """Port state by device of `ibv_devinfo`; None where it could not be asked."""
    if sample is None:
        return None
    found: dict[str, str] = {}
    name = ""
    for line in sample.text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "hca_id":
            name = value
            found[name] = ""
        elif key == "state" and name:
            found[name] = value.split(" ")[0]
    return found


def rdma_ports(sample: Output | None, wanted: Sequence[str]) -> Check:
    """`rdma ports`: whether the devices of the cable map are there and active."""
    name = "rdma ports"
    found = devices(sample)
    if found is None:
        return skip(name, "ibv_devinfo is missing: no RDMA on this macOS")
    evidence = "ibv_devinfo: " + (", ".join(f"{n} {s}" for n, s in found.items()) or "no devices")
    if not found:
        return warn(name, "there are no RDMA devices", evidence, RECOVERY)
    active = [device for device, state in found.items() if state == "PORT_ACTIVE"]
    missing = [device for device in wanted if device not in found]
    down = [device for device in wanted if device in found and device not in active]
    if missing:
        return fail(
            name,
            f"the cable map names {', '.join(missing)}, which this machine does not have",
            evidence,
            "correct the file of link.devices by the names of ibv_devinfo",
        )
    if down:
        return fail(
            name,
            f"{', '.join(down)} of the cable map is down",
            evidence,
            "plug the cable in, and enable RDMA on the other machine too; if it was active before, "
            "restart both machines",
        )
    if not active:
        return warn(
            name,
            "no port is active",
            evidence,
            "plug a Thunderbolt 5 cable in at both ends and enable RDMA on the other machine",
        )
    return ok(name, f"{', '.join(active)} active", evidence)


def cables(found: Sequence[Port] | None) -> Check:
    """`cables`: how many direct cables lead to another Mac, and how fast they are."""
    name = "cables"
    if found is None:
        return warn(
            name,
            "the Thunderbolt ports could not be read",
            "system_profiler told nothing",
            "run `system_profiler SPThunderboltDataType` and look for the other Mac",
        )
    joined = [port for port in found if port.peer]
    evidence = "; ".join(
        f"receptacle {port.receptacle} ({port.interface or 'no interface'}): "
        + (f"{port.device} at {port.speed}" if port.peer else "nothing")
        for port in found
    )
    if not joined:
        return fail(
            name,
            "no Thunderbolt cable leads to another Mac",
            evidence or "no ports",
            "join the two Macs directly with a Thunderbolt 5 cable, without a dock between",
        )
    slow = [port for port in joined if _gbps(port.speed) < 80]
    if slow:
        return warn(
            name,
            f"the cable at receptacle {slow[0].receptacle} runs at {slow[0].speed}",
            evidence,
            "use a Thunderbolt 5 cable of at most one metre, or an active one",
        )
    if len(joined) == 1:
        return warn(
            name,
            "one cable leads to the other Mac",
            evidence,
            "a second cable at another receptacle doubles the rate of the link",
        )
    return ok(name, f"{len(joined)} cables lead to the other Mac", evidence)


def _gbps(speed: str) -> int:
    found = re.search(r"(\d+)\s*Gb/s", speed)
    return int(found[1]) if found else 0


def crossed(
    mine: Sequence[Port] | None,
    theirs: Sequence[Mapping[str, Any]] | None,
    pairs: Sequence[tuple[str, str]],
) -> Check:
    """`cable map`: whether the k-th device names of both machines are ends of one cable.

    `theirs` are the peer's ports as its own doctor told them; `pairs` are the map's device names,
    (here, there).
    """
    name = "cable map"
    if not pairs:
        return skip(name, "link.devices is empty: the link speaks TCP and needs no map")
    if mine is None or theirs is None:
        return skip(name, "run `tandem doctor` on the other machine too: its ports are compared")
    ends = {f"rdma_{port.interface}": port for port in mine if port.interface}
    far = {str(port["domain"]): f"rdma_{port['interface']}" for port in theirs}
    told = []
    for here, there in pairs:
        port = ends.get(here)
        if port is None or not port.peer:
            return fail(
                name,
                f"no cable is plugged in at {here}, which the map names",
                f"{here}-{there}",
                "plug the cable in, or correct the file of link.devices",
            )
        told.append(f"{here} - {far.get(port.peer, 'unknown')}")
        if far.get(port.peer) != there:
            return fail(
                name,
                f"crossed: {here} is joined to {far.get(port.peer, 'another machine')}, the map "
                f"says {there}",
                "; ".join(told),
                "swap the names in the file of link.devices on both machines, or the cables",
            )
    return ok(name, "every pair of the map is one cable", "; ".join(told))


def addresses(sample: Output | None) -> dict[str, list[str]]:
    """IPv4 addresses by interface, from `ifconfig`."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in sample.text.splitlines() if sample else ():
        if head := re.match(r"(\w+): flags", line):
            name = head[1]
            found[name] = []
        elif (inet := re.match(r"\s+inet (\d+\.\d+\.\d+\.\d+)", line)) and name:
            found[name].append(inet[1])
    return found


def bridge(sample: Output | None, found: Sequence[Port] | None) -> Check:
    """`thunderbolt bridge`: whether the ports are in a bridge, which takes their addresses."""
    name = "thunderbolt bridge"
    if sample is None:
        return warn(name, "the interfaces could not be read", "ifconfig is missing", "run ifconfig")
    members = re.findall(r"^\s+member: (\w+)", sample.text, re.M)
    used = sorted({port.interface for port in found or () if port.peer} & set(members))
    if used:
        return warn(
            name,
            f"{', '.join(used)} belong to a bridge",
            "ifconfig: member " + ", ".join(used),
            "System Settings, Network: remove Thunderbolt Bridge, then give each port its own "
            "address",
        )
    return ok(name, "no cabled port is in a bridge", "ifconfig")


def link_address(host: str, sample: Output | None, found: Sequence[Port] | None) -> Check:
    """`link address` on a Mac: where `link.host` lies."""
    name = "link address"
    cure = (
        "System Settings, Network, Thunderbolt: configure IPv4 manually with this machine's "
        f"address, or correct link.host = {host!r}"
    )
    places = addresses(sample)
    at = [interface for interface, values in places.items() if host in values]
    evidence = "ifconfig: " + (", ".join(f"{i} {host}" for i in at) or "no such address")
    if not at:
        return fail(name, f"{host} is not an address of this machine now", evidence, cure)
    if ipaddress.ip_address(host).is_link_local:
        return warn(
            name,
            f"{host} was given by chance and changes when the cable is plugged in again",
            evidence,
            cure,
        )
    cabled = {port.interface for port in found or () if port.peer}
    if cabled and not set(at) & cabled:
        return warn(
            name,
            f"{host} is on {at[0]}, and the cables are on {', '.join(sorted(cabled))}",
            evidence,
            cure,
        )
    return ok(name, f"{host} on {at[0]}", evidence)
