"""Records of other formats, machines of other versions, addresses that come late."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from ports_kit import own_port
from redis_kit import eventually

from scheduler.config import Config, ConfigError, keep_model, load, resolved_environment
from scheduler.formats import FORMAT, KEY, settle
from scheduler.host import data_dir
from scheduler.host.late_bind import is_here
from scheduler.host.redis_server import probe
from scheduler.passwords import Passwords, write_private
from transport import versions
from transport.errors import LinkError
from transport.receiver import Receiver
from worker_decode.doorway import Doorway

# --- records --------------------------------------------------------------------------------------


def test_an_empty_redis_gets_the_present_format(client: redis.Redis) -> None:
    settle(client)
    settle(client)
    assert client.get(KEY) == str(FORMAT).encode()


def test_records_of_a_newer_tandem_are_refused(client: redis.Redis) -> None:
    client.set(KEY, FORMAT + 1)
    with pytest.raises(ConfigError, match="a newer Tandem has used it"):
        settle(client)
    assert client.get(KEY) == str(FORMAT + 1).encode()


def test_older_records_are_migrated_step_by_step(client: redis.Redis) -> None:
    client.set(KEY, 1)
    done: list[int] = []

    def step(number: int, broken: bool = False) -> None:
        if broken:
            raise redis.ConnectionError("cut off")
        done.append(number)

    with pytest.raises(redis.ConnectionError):
        settle(client, 3, {1: lambda _: step(1), 2: lambda _: step(2, broken=True)})
    assert client.get(KEY) == b"2"
    settle(client, 3, {1: lambda _: step(1), 2: lambda _: step(2)})
    assert done == [1, 2]
    with pytest.raises(ConfigError, match="cannot migrate"):
        settle(client, 5, {4: lambda _: None})


# --- versions -------------------------------------------------------------------------------------


def test_a_machine_of_another_version_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    mine = versions.hello("m3")
    versions.compare(mine, dataclasses.replace(mine, node="m5"))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        versions.compare(mine, dataclasses.replace(mine, node="m5", tandem="9.9"))
    assert "m5 runs Tandem 9.9" in caplog.text
    for field, name in (("protocol", "link protocol"), ("codec", "state format")):
        other = dataclasses.replace(mine, node="m5", **{field: 99})  # type: ignore[arg-type]
        with pytest.raises(LinkError, match=rf"{name} .*99 on m5.*install the same Tandem"):
            versions.compare(mine, other)
    assert versions.about()["protocol"] == str(mine.protocol)


# --- the choice of a model is kept ----------------------------------------------------------------


def test_the_configuration_keeps_everything_but_the_model(tmp_path: Path) -> None:
    file = tmp_path / "tandem.toml"
    text = '# mine\nmodel = "old"  # this one\n\n[link]\nhost = "127.0.0.1"\nbackend = "tcp"\n'
    file.write_text(text)
    keep_model(file, 'a "b"')
    assert file.read_text() == text.replace('model = "old"  # this one', 'model = "a \\"b\\""')
    assert load(file).model == 'a "b"'
    file.write_text('[link]\nbackend = "tcp"\n')
    keep_model(file, "new")
    assert load(file).model == "new"
    assert load(file).link.backend == "tcp"
    with pytest.raises(ConfigError, match="cannot be changed"):
        keep_model(tmp_path / "none.toml", "new")


# --- addresses that come late ---------------------------------------------------------------------


class Address:
    """An address of this machine that comes and goes, as a cable's does."""

    def __init__(self) -> None:
        self.host = f"10.253.{secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"

    def come(self) -> None:
        subprocess.run(["ip", "addr", "add", f"{self.host}/32", "dev", "lo"], check=True)

    def go(self) -> None:
        subprocess.run(
            ["ip", "addr", "del", f"{self.host}/32", "dev", "lo"], capture_output=True, check=False
        )


@pytest.fixture
def address() -> Iterator[Address]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("an address of its own needs Linux, root and iproute2")
    made = Address()
    yield made
    made.go()


def test_redis_listens_once_the_cable_is_in(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    words = Passwords.new()
    write_private(directory / "words", words.text())
    config = Config(
        data_dir=directory / "data",
        redis={
            "listen": f"{address.host}:{own_port()}",
            "password_file": str(directory / "words"),
        },
    )
    data_dir.prepare(config)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
        env=resolved_environment(config),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        probe(config.redis_url, 60)  # this machine is served without the address
        assert not is_here(address.host)
        address.come()
        url = f"redis://worker:{words.users['worker']}@{config.redis.listen}/0"
        assert probe(url, 60)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(directory)


def test_the_link_opens_once_the_cable_is_in(address: Address) -> None:
    opened: list[str] = []

    class Nothing:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    def receiver() -> Receiver:
        return Receiver(address.host, 0, secrets.token_bytes(32), Nothing(), 5.0)

    door = Doorway(address.host, receiver, opened.append, look_seconds=0.05)
    try:
        assert opened == []
        address.come()
        eventually(lambda: opened, "the link stays closed")
        assert opened[0].startswith(f"{address.host}:")
    finally:
        door.close()
    door = Doorway(address.host, receiver, opened.append)
    assert len(opened) == 2  # at once where the address is there
    door.close()
    address.go()
    Doorway(address.host, receiver, opened.append).close()  # ends although it never came
    assert len(opened) == 2
