"""Ask everything once, then judge: the checks of `tandem doctor` in the order of a day's work."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import redis
from redis.exceptions import RedisError

from scheduler.config import Config, ConfigError, without_password
from scheduler.doctor import capture, here, mac, machine, service, thunderbolt
from scheduler.doctor.finding import Check, fail, ok, skip
from scheduler.host import data_dir, model_files
from scheduler.host.agent import Machine, api_key
from scheduler.host.late_bind import is_here
from scheduler.host.redis_server import MINIMUM
from scheduler.host.reports import newest
from scheduler.host.service import DAEMON, installed
from scheduler.host.stack import WORKERS
from scheduler.nodes import Node, Nodes
from scheduler.redis_client import connect
from scheduler.serializer import pack, unpack
from store.errors import StoreError
from store.rpc import StoreClient
from transport.versions import about

#: How long one machine's doctor keeps what the other's compares with.
TOLD_SECONDS = 30 * 86_400
MAC_ONLY = (
    "rdma", "rdma ports", "cables", "cable map", "thunderbolt bridge", "wired limit", "sleep",
    "autostart",
)  # fmt: skip


@dataclass
class Facts:
    """What Redis said, if it answers. `up`: the roles that `tandem up` says it runs here."""

    answers: bool = False
    problem: str = ""
    version: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    config: dict[str, str] | None = None
    nodes: list[Node] = field(default_factory=list)
    skew: float | None = None
    reach: float = 0.0
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)
    up: tuple[str, ...] = ()
    api_url: str = ""


def examine(config: Config, directory: Path | None) -> list[Check]:
    """Every check, in order; none raises. `directory`: the model's files, if they are here."""
    samples = capture.samples()
    survey = machine.survey(directory)
    ports = thunderbolt.ports(samples.get("thunderbolt"), samples.get("ports"))
    facts = ask_redis(config, [port.to_dict() for port in ports or ()])
    process = data_dir.owner(config.data_dir)
    listed = capture.run(here.PROCESSES) if process is not None else None
    running = here.Running(
        process,
        (process is not None and facts.up) or here.roles_of(config),
        here.children(process, listed),
        config.data_dir / "logs",
    )
    roles = running.roles
    if process is None:  # entries outlive their processes by some seconds
        facts.nodes = [node for node in facts.nodes if not _has_ended(node)]
    weights = int(survey.get("weights", 0))
    metal = survey.get("device", {}).get("kind") == "metal"
    found = [
        mac.operating_system(samples["sw_vers"]) if samples else _system(),
        machine.memory(survey),
        machine.model(survey, directory, tuple(roles) == ("prefill",))
        if directory is not None
        else machine.absent(config.model_name, model_files.unknown(config), config.alone),
        machine.limits(),
        machine.secrets(config),
    ]
    if samples:
        pairs = cable_pairs(config)
        theirs = next((o["ports"] for o in facts.others.values() if o.get("ports")), None)
        found += [
            mac.wired_limit(samples["sysctl"], weights),
            mac.sleep(samples["pmset"]),
            mac.autostart(
                samples["filevault"],
                installed(),
                daemon=installed() == DAEMON,
                alone=len(roles) == 3,
            ),
            thunderbolt.rdma(samples["rdma_ctl"]),
            thunderbolt.rdma_ports(samples["ibv_devinfo"], [here for here, _ in pairs]),
            thunderbolt.cables(ports),
            thunderbolt.crossed(ports, theirs, pairs),
            thunderbolt.bridge(samples["ifconfig"], ports),
        ]
    else:
        found += [skip(name, "only on macOS") for name in MAC_ONLY]
    workers = _workers(config, facts, running, directory)
    found += [
        _link_address(config, samples, ports),
        here.up(running),
        _redis(config, facts, running),
        service.redis_settings(facts.config, facts.info, not config.redis.url)
        if facts.answers
        else skip("redis settings", "Redis does not answer"),
        *workers,
        here.api(_ask_api(config, facts, running), running, facts.nodes),
        service.clock(facts.skew, facts.reach),
        service.peer(facts.nodes, config.node, roles, _reach(facts.nodes, roles), facts.away)
        if facts.answers or len(roles) == 3
        else skip("peer", "Redis does not answer"),
        service.versions({**_told(facts.nodes, "about"), config.node: about()}, alone=config.alone),
        service.trouble(facts.nodes, [check.name for check in workers if check.status == "fail"]),
        service.drift(_told(facts.nodes, "drift")),
        service.keepalive(facts.nodes, config.device.keepalive_seconds, metal),
    ]
    if "decode" in roles:
        stats = _store_stats(config)
        used = int(stats["file_bytes"]) if stats else 0
        low = config.upkeep.low_disk_gb
        found.append(machine.disk(config.data_dir, config.store.size_gb, low, used))
        found.append(service.copies(stats))
        report = newest(config.data_dir)
        open_here = process is not None and directory is not None
        found.append(service.store(stats, report, time.time(), running=open_here))
    else:
        absent = ("store disk", "store copies", "store health")
        found += [skip(name, "the other machine keeps it") for name in absent]
    return found


def ask_redis(config: Config, ports: Sequence[Mapping[str, Any]]) -> Facts:
    """Everything that is wanted of Redis; tells it this machine's ports for the other's doctor."""
    facts = Facts()
    try:
        url = config.redis_url_of("admin")
        with connect(url, timeout=3.0, patience=0) as client:
            began = time.time()
            seconds, micros = cast(tuple[int, int], client.time())
            facts.reach = time.time() - began
            facts.skew = began + facts.reach / 2 - (seconds + micros / 1e6)
            facts.info = dict(client.info())
            kind = "valkey" if "valkey_version" in facts.info else "redis"
            facts.version = f"{kind} {facts.info[f'{kind}_version']}"
            facts.answers = True
            facts.config = _config_of(client)
            seen = Nodes(client).survey()
            facts.nodes = list(seen.nodes)
            machines = _machines(client)
            facts.up = next((one.roles for one in machines if one.node == config.node), ())
            facts.api_url = _text(client.get(api_key(config.node)))
            silent = {f"{role} {one.node}" for one in machines for role in one.silent(seen.nodes)}
            facts.away = sorted(
                name
                for name in silent | {f"decode {name}" for name in seen.away}
                if name.split()[1] != config.node
            )
            mine = f"tandem:doctor:{config.node}"
            client.set(mine, pack({"ports": list(ports), "about": about()}), ex=TOLD_SECONDS)
            for key in client.scan_iter("tandem:doctor:*"):
                if key != mine.encode() and (value := cast("bytes | None", client.get(key))):
                    facts.others[key.decode().rpartition(":")[2]] = unpack(value)
    except (RedisError, OSError, ConfigError) as error:
        lines = str(error).splitlines()
        facts.problem = lines[0] if lines else type(error).__name__
    return facts


def _machines(client: redis.Redis) -> list[Machine]:
    try:
        return Machine.all(client)
    except (TypeError, ValueError, KeyError):  # one is of another version
        return []


def _text(value: Any) -> str:
    return bytes(value or b"").decode()


def _workers(
    config: Config, facts: Facts, running: here.Running, directory: Path | None
) -> list[Check]:
    """What is to be said of this machine's workers."""
    found = []
    for role in WORKERS:
        mine = (n for n in facts.nodes if (n.role, n.name) == (role, config.node))
        node = next(mine, None)
        if running.up is None and node is not None and node.host != socket.gethostname():
            node = None  # another machine of this name
        awaits = running.up is not None and role not in (running.children or {role})
        if awaits and directory is None and role in running.roles:
            found.append(here.without_model(role, config.model_name))
        else:
            found.append(here.worker(role, node, running, facts.answers))
    return found


def _has_ended(node: Node) -> bool:
    """Whether the process of a node was one of this machine, and is no more."""
    try:
        os.kill(node.pid, 0)
    except ProcessLookupError:
        return node.host == socket.gethostname()
    except OSError:
        return False
    return False


def _ask_api(config: Config, facts: Facts, running: here.Running) -> dict[str, Any] | None:
    """What this machine's API says; None where nobody listens, or its port is not known."""
    url = facts.api_url or (config.api_url if config.api.port else "")
    stopped = here.is_stopped(running, "api")
    asked = "api" in running.roles and running.up is not None and url and not stopped
    return here.ask_api(url) if asked else None


def cable_pairs(config: Config) -> list[tuple[str, str]]:
    """Device names (here, there) of the cable map, the decode machine being its first row."""
    if not config.link.devices:
        return []
    try:
        table = json.loads(Path(config.link.devices).expanduser().read_text(encoding="utf-8"))
        rows = [table[0][1], table[1][0]]
        first, second = ([cell] if isinstance(cell, str) else list(cell) for cell in rows)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return [("no such map", config.link.devices)]
    decodes = not config.roles or "decode" in config.roles
    here, there = (first, second) if decodes else (second, first)
    return list(zip(here, there, strict=False))


def _config_of(client: redis.Redis) -> dict[str, str] | None:
    names = ("appendonly", "maxmemory-policy", "appendfsync")
    try:
        return {name: str(client.config_get(name)[name]) for name in names}
    except (RedisError, KeyError):
        return None  # the user may not: INFO says the most of it


def _system() -> Check:
    return ok("os", about()["system"], "development and tests; the service is meant for Macs")


def _redis(config: Config, facts: Facts, running: here.Running) -> Check:
    name = "redis"
    url = config.redis.url and without_password(config.redis.url)
    where = url or f"Tandem's own at {config.redis.listen or config.redis_socket}"
    if facts.answers:
        least = MINIMUM["valkey" if facts.version.startswith("valkey") else "redis"]
        number = tuple(int(part) for part in facts.version.split(" ")[1].split(".")[:2])
        if number < least:
            return fail(
                name, f"{facts.version} is too old", where, f"install {least[0]}.{least[1]}"
            )
        return ok(name, f"{facts.version} answers", where)
    if not config.redis.url and running.up is not None:
        return here.redis_away(running, where, facts.problem)
    if not config.redis.url and not config.redis_socket.exists():
        return skip(name, "it is started by `tandem up`", where)
    return fail(
        name,
        "it does not answer",
        f"{where}: {facts.problem}",
        "start the machine that runs it, check the cable, and join again with the string of "
        "`tandem init --show-join`",
    )


def _link_address(
    config: Config,
    samples: Mapping[str, capture.Output | None],
    ports: Sequence[thunderbolt.Port] | None,
) -> Check:
    name = "link address"
    host = config.link.host
    if not config.roles or host in ("127.0.0.1", "::1", "localhost"):
        return skip(name, "everything runs on this machine")
    if samples:
        return thunderbolt.link_address(host, samples["ifconfig"], ports)
    if is_here(host):
        return ok(name, f"{host} is an address of this machine")
    return fail(
        name,
        f"{host} is not an address of this machine now",
        "",
        "plug the cable in, give the port this address, or correct link.host",
    )


def _reach(nodes: Sequence[Node], roles: Sequence[str]) -> str | None:
    """Whether the decode machine's link can be connected to from a machine that only prefills."""
    if "decode" in roles:
        return None
    for node in nodes:
        if node.role == "decode" and node.link:
            host, _, port = node.link.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
            except (OSError, ValueError) as error:
                return f"{node.link}: {error}"
            return ""
    return None


def _told(nodes: Sequence[Node], what: str) -> dict[str, Any]:
    return {f"{n.role} {n.name}": n.facts[what] for n in nodes if n.facts.get(what)}


def _store_stats(config: Config) -> dict[str, Any] | None:
    client = StoreClient(config.store_socket, timeout=5.0)
    try:
        return client.stats()
    except StoreError:
        return None
    finally:
        client.close()


def counts(checks: Sequence[Check]) -> dict[str, int]:
    """How many of each status."""
    found = {"ok": 0, "warn": 0, "fail": 0, "skip": 0}
    for check in checks:
        found[check.status] += 1
    return found
