"""Every probe of the doctor on good, bad and missing samples of what the commands print."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from scheduler.config import Config
from scheduler.doctor import capture, mac, machine, service, thunderbolt
from scheduler.doctor.capture import COMMANDS, Output, run
from scheduler.doctor.finding import Check, Status
from scheduler.doctor.run import MAC_ONLY, examine
from scheduler.host import model_files
from scheduler.nodes import Node
from scheduler.passwords import Passwords, write_private

DATA = Path(__file__).parent.parent / "data" / "doctor"
MODEL = 186_000_000_000


def sample(name: str) -> Output | None:
    return Output((DATA / name).read_text()) if name else None


def ports(name: str) -> list[thunderbolt.Port] | None:
    return thunderbolt.ports(sample(name and f"thunderbolt.{name}"), sample("ports.good"))


def told(check: Check, status: Status, *words: str) -> None:
    """A check of this status, with these words, and a cure unless all is well."""
    assert check.status == status, check
    text = f"{check.finding} {check.evidence} {check.cure}"
    for word in words:
        assert word in text
    assert status == "skip" or bool(check.cure) == (status != "ok")
    assert all("\n" not in part for part in (check.finding, check.evidence, check.cure))


def test_every_sample_of_a_mac_is_asked_without_privileges() -> None:
    assert {"sw_vers", "sysctl", "pmset", "rdma_ctl", "ibv_devinfo", "thunderbolt"} <= set(COMMANDS)
    assert not any(command[0] == "sudo" for command in COMMANDS.values())


def test_a_command_that_is_missing_or_fails() -> None:
    assert run(("tandem-no-such-command",)) is None
    failed = run(("sh", "-c", "echo out; echo err >&2; exit 3"))
    assert failed is not None
    assert (failed.status, failed.last) == (3, "err")


def test_a_mac_whose_commands_are_all_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "samples", lambda: dict.fromkeys(COMMANDS))
    monkeypatch.setattr(machine, "survey", lambda _: {"error": "not here"})
    checks = {check.name: check for check in examine(Config(data_dir=tmp_path), None)}
    assert set(MAC_ONLY) <= set(checks)
    assert not any(check.finding == "only on macOS" for check in checks.values())


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("sw_vers.good", "ok", ["26.5.1", "25F80"]),
        ("sw_vers.small-frames", "warn", ["4 KiB", "26.3"]),
        ("sw_vers.old", "warn", ["14.5", "TCP", "update both"]),
        ("sw_vers.bad", "warn", ["could not be read"]),
        ("", "warn", ["sw_vers is missing"]),
    ],
)
def test_os(name: str, status: Status, words: list[str]) -> None:
    told(mac.operating_system(sample(name)), status, *words)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("sysctl.good", "ok", ["system's own"]),
        ("sysctl.raised", "ok", ["240 GiB"]),
        ("sysctl.low", "fail", ["96 GiB", "186 GB", "wired_limit_mb=0"]),
        ("sysctl.greedy", "warn", ["less than 8 GiB", "sudo sysctl"]),
        ("sysctl.bad", "warn", ["could not be read", "unknown oid"]),
        ("", "warn", ["sysctl is missing"]),
    ],
)
def test_wired_limit(name: str, status: Status, words: list[str]) -> None:
    told(mac.wired_limit(sample(name), MODEL), status, *words)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("pmset.good", "ok", ["does not sleep"]),
        ("pmset.disabled", "ok", ["does not sleep"]),
        ("pmset.sleeps", "fail", ["after 1 min", "pmset -a sleep 0"]),
        ("pmset.disk-sleeps", "warn", ["disksleep is on"]),
        ("pmset.stays-off", "warn", ["power cut", "autorestart 1"]),
        ("pmset.bad", "warn", ["could not be read"]),
        ("", "warn", ["pmset is missing"]),
    ],
)
def test_sleep(name: str, status: Status, words: list[str]) -> None:
    told(mac.sleep(sample(name)), status, *words)


AGENT = Path("/Users/me/Library/LaunchAgents/org.tandem.serve.plist")


@pytest.mark.parametrize(
    ("daemon", "alone", "vault", "status", "words"),
    [
        (True, False, "FileVault is Off.", "ok", ["at every boot"]),
        (True, False, "FileVault is On.", "ok", ["at every boot", "unlocked"]),
        (False, True, "FileVault is On.", "ok", ["logs in", "unlocked"]),
        (False, False, "FileVault is Off.", "warn", ["--system", "Local Network"]),
    ],
)
def test_autostart(daemon: bool, alone: bool, vault: str, status: Status, words: list[str]) -> None:
    told(mac.autostart(Output(vault), AGENT, daemon=daemon, alone=alone), status, *words)


def test_autostart_of_no_service_and_without_an_answer() -> None:
    told(mac.autostart(None, None, daemon=False, alone=True), "skip", "service install")
    check = mac.autostart(None, AGENT, daemon=True, alone=True)
    told(check, "ok", "at every boot")
    assert "FileVault" not in check.finding


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("rdma_ctl.good", "ok", ["enabled"]),
        ("rdma_ctl.disabled", "warn", ["disabled", "Recovery"]),
        ("rdma_ctl.bad", "warn", ["could not be read"]),
        ("", "warn", ["rdma_ctl is missing", "TCP"]),
    ],
)
def test_rdma(name: str, status: Status, words: list[str]) -> None:
    told(thunderbolt.rdma(sample(name)), status, *words)


@pytest.mark.parametrize(
    ("name", "wanted", "status", "words"),
    [
        ("ibv_devinfo.good", [], "ok", ["rdma_en2, rdma_en3 active"]),
        ("ibv_devinfo.good", ["rdma_en2"], "ok", ["rdma_en2"]),
        ("ibv_devinfo.good", ["rdma_en4"], "fail", ["rdma_en4 of the cable map is down"]),
        ("ibv_devinfo.good", ["rdma_en9"], "fail", ["rdma_en9", "does not have"]),
        ("ibv_devinfo.down", [], "warn", ["no port is active", "PORT_DOWN"]),
        ("ibv_devinfo.none", [], "warn", ["no RDMA devices"]),
        ("", [], "skip", ["ibv_devinfo is missing"]),
    ],
)
def test_rdma_ports(name: str, wanted: list[str], status: Status, words: list[str]) -> None:
    told(thunderbolt.rdma_ports(sample(name), wanted), status, *words)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("two-cables", "ok", ["2 cables", "receptacle 1 (en2)", "receptacle 3 (en4): nothing"]),
        ("one-cable", "warn", ["one cable", "second"]),
        ("slow-cable", "warn", ["receptacle 2 runs at 40 Gb/s", "Thunderbolt 5 cable"]),
        ("dock", "fail", ["no Thunderbolt cable", "without a dock"]),
        ("none", "fail", ["no Thunderbolt cable"]),
        ("bad", "warn", ["could not be read"]),
        ("", "warn", ["could not be read"]),
    ],
)
def test_cables(name: str, status: Status, words: list[str]) -> None:
    told(thunderbolt.cables(ports(name)), status, *words)


STRAIGHT = [("rdma_en2", "rdma_en2"), ("rdma_en3", "rdma_en3")]


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs", "status", "words"),
    [
        ("two-cables", "other-side", STRAIGHT, "ok", ["every pair"]),
        ("two-cables", "other-side-crossed", STRAIGHT, "fail",
         ["crossed: rdma_en2 is joined to rdma_en3", "swap"]),
        ("two-cables", "other-side-crossed", [("rdma_en2", "rdma_en3"), ("rdma_en3", "rdma_en2")],
         "ok", ["every pair"]),
        ("one-cable", "other-side", STRAIGHT, "fail", ["no cable is plugged in at rdma_en3"]),
        ("two-cables", "other-side", [("rdma_en9", "rdma_en2")], "fail", ["rdma_en9"]),
        ("two-cables", "", STRAIGHT, "skip", ["on the other machine too"]),
        ("", "other-side", STRAIGHT, "skip", ["on the other machine too"]),
        ("two-cables", "other-side", [], "skip", ["link.devices is empty"]),
    ],
)  # fmt: skip
def test_cable_map(
    mine: str, theirs: str, pairs: list[tuple[str, str]], status: Status, words: list[str]
) -> None:
    far = ports(theirs)
    plain = None if far is None else [port.to_dict() for port in far]
    told(thunderbolt.crossed(ports(mine), plain, pairs), status, *words)


@pytest.mark.parametrize(
    ("host", "name", "status", "words"),
    [
        ("10.0.0.1", "ifconfig.good", "ok", ["on en2"]),
        ("192.168.1.20", "ifconfig.good", "warn", ["on en0", "cables are on en2, en3"]),
        ("10.0.0.9", "ifconfig.good", "fail", ["not an address", "link.host"]),
        ("169.254.12.7", "ifconfig.bridged", "warn", ["by chance"]),
        ("10.0.0.1", "", "fail", ["not an address"]),
    ],
)
def test_link_address(host: str, name: str, status: Status, words: list[str]) -> None:
    told(thunderbolt.link_address(host, sample(name), ports("two-cables")), status, *words)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("ifconfig.good", "ok", ["no cabled port"]),
        ("ifconfig.bridged", "warn", ["en2, en3 belong to a bridge", "remove"]),
        ("", "warn", ["ifconfig is missing"]),
    ],
)
def test_thunderbolt_bridge(name: str, status: Status, words: list[str]) -> None:
    told(thunderbolt.bridge(sample(name), ports("two-cables")), status, *words)


# --- under any system -----------------------------------------------------------------------------

DEVICE = {"kind": "metal", "name": "Apple M5 Ultra", "memory_bytes": 256e9,
          "working_set_bytes": 208e9, "mlx": "0.32.4"}  # fmt: skip


def survey(**more: Any) -> dict[str, Any]:
    return {"device": DEVICE, "weights": 100e9, "whole": True, "problem": "", **more}


def test_memory() -> None:
    told(machine.memory(survey()), "ok", "256 GB of unified memory", "working set 208 GB")
    told(
        machine.memory({"error": "MLX cannot be imported"}), "fail", "does not work", "pip install"
    )
    told(machine.memory(survey(device={**DEVICE, "kind": "cpu"})), "ok", "CPU")


@pytest.mark.parametrize(
    ("found", "prefill_only", "status", "words"),
    [
        (survey(), False, "ok", ["it fits", "48%"]),
        (survey(weights=190e9), False, "warn", ["little room"]),
        (survey(weights=400e9), False, "fail", ["does not fit this machine"]),
        (survey(weights=400e9), True, "fail", ["decode only is the plan", "roles = []"]),
        (survey(whole=False, problem="m lacks 2 of 9 weight files"), False, "fail",
         ["lacks 2", "tandem model verify"]),
        ({"error": "no engine"}, False, "skip", ["no engine"]),
    ],
)  # fmt: skip
def test_model(found: dict[str, Any], prefill_only: bool, status: Status, words: list[str]) -> None:
    told(machine.model(found, Path("m"), prefill_only), status, *words)


@pytest.mark.parametrize(
    ("name", "alone", "status", "words"),
    [
        ("owner/name", False, "warn", ["fetched at the first start"]),
        ("nosuchmodel", False, "warn", ["neither", "tandem model push nosuchmodel", "--model DIR"]),
        ("nosuchmodel", True, "fail", ["neither", "--model DIR"]),
        ("/no/such/model", True, "fail", ["no directory /no/such/model"]),
    ],
    ids=["hub", "bare", "alone", "path"],
)
def test_a_model_that_is_not_here(
    name: str, alone: bool, status: Status, words: list[str], tmp_path: Path
) -> None:
    unknown = model_files.unknown(Config(data_dir=tmp_path, models_dir=tmp_path, model=name))
    check = machine.absent(name, unknown, alone)
    told(check, status, *words)
    assert ("first start" in check.cure) == (name == "owner/name")


def test_store_disk(tmp_path: Path) -> None:
    told(machine.disk(tmp_path / "new", 0.001, 0.0), "ok", "GB free")
    told(machine.disk(tmp_path, 1e6, 0.0), "warn", "store.size_gb")
    told(machine.disk(tmp_path, 1.0, 1e9), "fail", "no longer saved", "free some space")


def test_store_copies() -> None:
    told(service.copies({"copies": "portable"}), "ok", "one pass", "portable")
    cures = ("more slowly", "xcode-select --install", "pip install --no-deps -e .")
    told(service.copies({"copies": "in turns"}), "warn", *cures)


def test_store_copies_of_a_store_that_is_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "store"
    (installed / "codec").mkdir(parents=True)
    monkeypatch.setattr(service.store_package, "__path__", [str(installed)])
    told(service.copies(None), "warn", "not built", "--force-reinstall --no-deps")
    (tmp_path / "pyproject.toml").touch()
    told(service.copies(None), "warn", f"run in {tmp_path}", "install --no-deps -e .")
    (installed / "codec" / "_scatter.abi3.so").touch()
    importlib.invalidate_caches()
    told(service.copies(None), "ok", "built: _scatter.abi3.so")


def test_ulimits() -> None:
    told(machine.limits(100_000), "ok", "100000")
    told(machine.limits(256), "warn", "256 open files")


def test_secrets(tmp_path: Path) -> None:
    path = tmp_path / "redis"
    config = Config(data_dir=tmp_path, redis={"password_file": path})
    told(machine.secrets(Config(data_dir=tmp_path)), "skip", "own")
    told(machine.secrets(config), "fail", "cannot be read", "tandem init")
    write_private(path, Passwords.new().text())
    told(machine.secrets(config), "ok", "admin, api, worker, dashboard")
    path.chmod(0o644)
    told(machine.secrets(config), "fail", "read by others", "chmod 600")


SETTINGS = {"appendonly": "yes", "maxmemory-policy": "noeviction", "appendfsync": "everysec"}


@pytest.mark.parametrize(
    ("config", "info", "status", "words"),
    [
        (SETTINGS, {}, "ok", ["append-only, no eviction"]),
        (None, {"aof_enabled": 1, "maxmemory_policy": "noeviction"}, "ok", ["append-only"]),
        (
            {**SETTINGS, "maxmemory-policy": "allkeys-lru"},
            {},
            "fail",
            ["allkeys-lru", "noeviction"],
        ),
        ({**SETTINGS, "appendonly": "no"}, {}, "fail", ["lost when it restarts"]),
        (None, {"aof_enabled": 0}, "fail", ["lost when it restarts"]),
        (SETTINGS, {"aof_last_write_status": "err"}, "fail", ["cannot write"]),
        ({**SETTINGS, "appendfsync": "no"}, {}, "warn", ["half a minute"]),
    ],
)
def test_redis_settings(
    config: dict[str, str] | None, info: dict[str, Any], status: Status, words: list[str]
) -> None:
    told(service.redis_settings(config, info, ours=False), status, *words)


def test_clock() -> None:
    told(service.clock(0.004, 0.001), "ok", "4 ms")
    told(service.clock(-2.5, 0.001), "warn", "2.5 s", "time automatically")
    told(service.clock(120.0, 0.001), "fail", "120 s")
    told(service.clock(None, 0.0), "skip")


def test_peer() -> None:
    ready = Node("prefill", "prefill", state="ready", host="m5")
    told(service.peer([ready], "local", ["api", "decode"], None), "ok", "prefill worker is ready")
    told(service.peer([], "local", ["api", "decode"], None), "warn", "tandem up")
    loading = Node("prefill", "prefill", state="starting")
    told(service.peer([loading], "local", ["api", "decode"], None), "warn", "not ready yet")
    decode = Node("decode", "local", state="ready", link="10.0.0.1:5")
    told(service.peer([decode], "prefill", ["prefill"], ""), "ok", "its link answers")
    told(service.peer([decode], "prefill", ["prefill"], "refused"), "fail", "firewall", "refused")
    whole = ["api", "decode", "prefill"]
    told(service.peer([], "local", whole, None), "skip")
    told(service.peer([], "local", whole, None, ["decode b"]), "warn", "decode b does not report")
    decodes = ["api", "decode"]
    told(service.peer([ready], "local", decodes, None, ["decode b"]), "warn", "node forget")


ABOUT = {"protocol": "1", "codec": "1", "tandem": "0.1", "mlx": "0.32.4", "system": "macOS 26.5"}


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, "ok"), ({"protocol": "2"}, "fail"), ({"codec": "2"}, "fail"), ({"tandem": "0.2"}, "warn"),
     ({"mlx": "0.33"}, "warn"), ({"system": "macOS 26.6"}, "warn")],
)  # fmt: skip
def test_versions(change: dict[str, str], status: Status) -> None:
    found = {"local": ABOUT, "prefill": {**ABOUT, **change}}
    told(service.versions(found), status, *change.values())


def test_versions_of_one_machine() -> None:
    told(service.versions({"local": ABOUT}), "skip", "both machines")
    told(service.versions({"local": ABOUT}, alone=True), "skip", "no other machine")
    twice = {"local": ABOUT, "prefill local": ABOUT}
    told(service.versions(twice, alone=True), "ok", "no other machine")
    twice["prefill local"] = {**ABOUT, "mlx": "0.33"}
    told(service.versions(twice, alone=True), "warn", "start `tandem up` again")


def test_drift_is_told_and_never_an_error() -> None:
    one = {"ids": [5, 9], "logits": [3.0, 2.0], "device": "M5"}
    told(service.drift({"a": one}), "skip")
    told(service.drift({"a": one, "b": one}), "ok", "the same bits")
    other = {"ids": [9, 5], "logits": [2.5, 2.25], "device": "M3"}
    told(service.drift({"a": one, "b": other}), "ok", "0.75", "another best token")
    told(service.drift({"a": one, "b": {"ids": [1], "logits": [1.0]}}), "warn", "two models")


def test_store_health() -> None:
    stats = {"conversations": 3, "live_share": 0.2, "damaged": 0}
    clean = {"clean": True, "at": 1e9}
    told(service.store(stats, clean, 1e9 + 3600), "ok", "3 conversations", "clean")
    told(service.store(stats, clean, 1e9 + 9 * 86_400), "warn", "9 days ago")
    told(service.store({**stats, "damaged": 2}, None, 0.0), "fail", "--repair")
    bad = {"clean": False, "found": 2, "problems": ["block ab: missing"], "at": 0.0}
    told(service.store(None, bad, 0.0), "fail", "2 problems", "block ab")
    told(service.store(None, None, 0.0), "skip")
    told(service.store(None, clean, 1e9, running=True), "warn", "does not answer", "clean")


def test_serving() -> None:
    full = Node("decode", "local", facts={"trouble": "the disk is full"})
    told(service.trouble([]), "skip", "no worker reports")
    told(service.trouble([full]), "warn", "decode local: the disk is full")
    fine = Node("decode", "local")
    told(service.trouble([fine]), "ok", "decode local")
    told(service.trouble([fine], ["prefill worker"]), "skip", "no answer from the prefill worker")


def test_gpu_keep_alive() -> None:
    told(service.keepalive([], -1, metal=False), "skip", "Metal")
    told(service.keepalive([], 0, metal=True), "warn", "keepalive_seconds to -1")
    node = Node("decode", "local", facts={"pulses": 7})
    told(service.keepalive([node], -1, metal=True), "ok", "[7]")
