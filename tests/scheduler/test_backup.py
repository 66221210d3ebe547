"""Backups of a running machine, put back: jobs, turns, states; and what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_kit import eventually

from scheduler import cli
from scheduler.config import Config, ConfigError, resolved_environment
from scheduler.files import Files
from scheduler.host import backup, data_dir, reports
from scheduler.host.data_dir import Claim
from scheduler.host.duties import Nightly, last_due
from scheduler.host.redis_server import probe
from scheduler.jobs import Jobs
from scheduler.record import NewJob, response_id
from scheduler.redis_client import connect
from store.serving import serve
from store.store import Store
from store.turns import Turn

CONVERSATION = "conv_" + "1" * 32


def turn(number: int) -> Turn:
    return Turn(
        id=f"resp_{number:032x}",
        conversation=CONVERSATION,
        parent=f"resp_{number - 1:032x}" if number else None,
        owner="",
        model="m",
        fingerprint=bytes(16),
        prompt_ids=[number, number + 1],
        output_ids=[number + 2],
        items=[],
        created=1.7e9,
    )


class Machine:
    """Our Redis, and a store that this process owns and serves."""

    def __init__(self, config: Config) -> None:
        self.config = config
        data_dir.prepare(config)
        self.redis = subprocess.Popen(
            [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
            env=resolved_environment(config),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.claim = Claim(config.data_dir)
        self.store = Store.open(config.data_dir / "store", 64 << 20)
        self.server = serve(self.store, config.store_socket)
        probe(config.redis_url, 60)

    def accept(self) -> str:
        with connect(self.config.redis_url) as client:
            new = NewJob(response_id(), "m", {"input": "?"}, [1, 2, 3], stage="prefill")
            return Jobs(client).accept(new).id

    def status(self, ident: str) -> str:
        with connect(self.config.redis_url) as client:
            return Jobs(client).get(ident).status

    def stop(self) -> None:
        self.server.close()
        self.store.close()
        self.redis.terminate()
        self.redis.wait()
        self.claim.release()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [n for n in os.environ if n.startswith("TANDEM_") or n == "REDIS_URL"]:
        monkeypatch.delenv(name)
    path = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.chdir(path)
    yield path
    shutil.rmtree(path)


def silent(_: str) -> None:
    pass


def test_a_copy_of_nothing_is_no_backup(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "a").mkdir()
    assert cli.main(["backup", "copy", "--data", "a"]) == 2
    assert "nothing to copy" in capsys.readouterr().err
    assert not (directory / "copy").exists()
    # The machine that prefills keeps its configuration and its password.
    (directory / "a" / "tandem.toml").touch()
    assert cli.main(["backup", "copy", "--data", "a"]) == 0


def test_a_running_machine_is_copied_and_put_back(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(Config(data_dir=directory / "a"))
    (directory / "a" / "tandem.toml").write_text("# mine\n")
    try:
        job = machine.accept()
        machine.store.put_turn(turn(0))
        with connect(machine.config.redis_url) as client:
            kept = Files(client, directory / "a" / "files", 1 << 20)
            file = kept.put(io.BytesIO(b"lines"), owner="@a", name="f", purpose="batch")
        assert cli.main(["backup", "copy", "--data", "a"]) == 0
        later = machine.accept()
        machine.store.put_turn(turn(1))
    finally:
        machine.stop()
    for path in (directory / "copy").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.is_dir(), path
    assert (directory / "copy").stat().st_mode & 0o077 == 0
    assert (directory / "copy" / "tandem.toml").read_text() == "# mine\n"
    assert cli.main(["restore", "copy", "--data", "b"]) == 0
    assert capsys.readouterr().out.endswith("start it: tandem up --data b\n")
    other = Machine(Config(data_dir=directory / "b"))
    try:
        assert other.status(job) == "queued"
        with pytest.raises(Exception, match=later):
            other.status(later)
        assert other.store.turn_ids(turn(0).id) == [0, 1, 2]
        assert other.store.get_turn(turn(1).id) is None
        assert other.store.check().clean
        with connect(other.config.redis_url) as client:
            put_back = Files(client, directory / "b" / "files", 1 << 20)
            found = put_back.get(file.id)
            assert found == file
            with put_back.open(file) as contents:
                assert contents.read() == b"lines"
    finally:
        other.stop()


def test_a_resting_machine_is_copied_too(directory: Path) -> None:
    machine = Machine(Config(data_dir=directory / "a"))
    job = machine.accept()
    machine.store.put_turn(turn(0))
    machine.stop()
    found = backup.backup(machine.config, directory / "copy", silent)
    assert found["redis"]["keys"] > 0
    backup.restore(Config(data_dir=directory / "b"), directory / "copy", silent)
    other = Machine(Config(data_dir=directory / "b"))
    try:
        assert other.status(job) == "queued"
        assert other.store.get_turn(turn(0).id) is not None
    finally:
        other.stop()


def test_what_is_there_is_not_overwritten(directory: Path) -> None:
    machine = Machine(Config(data_dir=directory / "a"))
    try:
        first = machine.accept()
        backup.backup(machine.config, directory / "copy", silent)
        with pytest.raises(ConfigError, match="exists already"):
            backup.backup(machine.config, directory / "copy", silent)
        with pytest.raises(ConfigError, match="in use by another Tandem"):
            backup.restore(machine.config, directory / "copy", silent)
        second = machine.accept()
    finally:
        machine.stop()
    with pytest.raises(ConfigError, match="holds a redis and a store already: pass --replace"):
        backup.restore(machine.config, directory / "copy", silent)
    backup.restore(machine.config, directory / "copy", silent, replace=True)
    (aside,) = (directory / "a").glob("before-restore-*")
    assert sorted(path.name for path in aside.iterdir()) == ["redis", "store"]
    again = Machine(machine.config)
    try:
        assert again.status(first) == "queued"
        with pytest.raises(Exception, match=second):
            again.status(second)
    finally:
        again.stop()


def test_a_damaged_backup_is_refused_and_changes_nothing(directory: Path) -> None:
    machine = Machine(Config(data_dir=directory / "a"))
    machine.accept()
    backup.backup(machine.config, directory / "copy", silent)
    machine.stop()
    fresh = Config(data_dir=directory / "b")
    dump = directory / "copy" / "redis" / "dump.rdb"
    data = bytearray(dump.read_bytes())
    data[len(data) // 2] ^= 1
    dump.write_bytes(data)
    with pytest.raises(ConfigError, match=r"dump\.rdb is damaged"):
        backup.restore(fresh, directory / "copy", silent)
    dump.unlink()
    with pytest.raises(ConfigError, match="not a whole backup"):
        backup.restore(fresh, directory / "copy", silent)
    manifest = directory / "copy" / backup.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(ConfigError, match=r"format 99.*use that version"):
        backup.restore(fresh, directory / "copy", silent)
    with pytest.raises(ConfigError, match="not a whole backup"):
        backup.restore(fresh, directory / "none", silent)
    assert not (directory / "b").exists()


# --- the nightly check ----------------------------------------------------------------------------


def test_when_a_check_is_due() -> None:
    noon = 1_700_000_000 - 1_700_000_000 % 86_400 + 12 * 3600
    for hour in range(24):
        due = last_due(noon, hour)
        assert due <= noon < due + 86_400 + 3601
    assert last_due(last_due(noon, 5), 5) == last_due(noon, 5)
    assert last_due(last_due(noon, 5) - 1, 5) < last_due(noon, 5) - 80_000


def test_the_nightly_check_keeps_its_report(directory: Path) -> None:
    # Half a day away: the hour does not come while this runs.
    hour = (time.localtime().tm_hour + 12) % 24
    upkeep = {"keep_reports": 1, "check_hour": hour}
    config = Config(data_dir=directory / "a", upkeep=upkeep)
    machine = Machine(config)
    try:
        machine.store.put_turn(turn(0))
        nightly = Nightly(config, frozenset({"decode"}))
        nightly()
        assert reports.newest(config.data_dir) is None  # not at once, but in the next night
        for _ in range(2):
            nightly._last = 0.0
            nightly()
            eventually(
                lambda: (nightly(), nightly._process is None)[1],
                "the check does not end",
                180,
            )
            found = reports.newest(config.data_dir)
            assert found is not None
            assert found["clean"] is True
            assert found["turns"] == 1
            newest = sorted(reports.directory(config.data_dir).iterdir())[-1]
            newest.rename(newest.with_name("store-check-2020-01-01-000000.json"))
        assert len(list(reports.directory(config.data_dir).glob("*.json"))) <= 1
        nightly()
        assert nightly._process is None  # once a night
    finally:
        machine.stop()


def test_no_check_where_there_is_no_store_or_no_wish(directory: Path) -> None:
    config = Config(data_dir=directory / "a")
    for duty in (
        Nightly(config, frozenset({"prefill"})),
        Nightly(Config(data_dir=directory, upkeep={"check_hour": -1}), frozenset({"decode"})),
    ):
        duty._last = 0.0
        duty()
        assert duty._process is None
