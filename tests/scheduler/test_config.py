"""Where settings come from, which one wins, and what is said about a wrong one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scheduler.config import (
    RESOLVED,
    Config,
    ConfigError,
    is_loopback,
    load,
    resolved_environment,
    without_password,
)
from store.paths import socket_path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty environment and an empty current directory."""
    for name in os.environ:
        if name.startswith(("TANDEM_", "XDG_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def fails(*arguments: Any) -> str:
    """The one line that a wrong configuration is answered with."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- where settings come from -------------------------------------------------------------------


def test_defaults_need_no_file() -> None:
    config = load()
    assert (config.api.host, config.api.port, config.node) == ("127.0.0.1", 8420, "local")
    assert config.redis_url == f"unix://{config.redis_socket}?db=0"
    assert config.data_dir.is_absolute()
    assert config.data_dir.name == "tandem"


def test_later_sources_win(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "tandem.toml", '[api]\nport = 1\n[decode]\nslots = 2\n[store]\nsave = "turn"')
    assert load().api.port == 1
    monkeypatch.setenv("TANDEM_API_PORT", "2")
    assert load().api.port == 2
    config = load(None, {"api.port": 3, "model": None})
    assert (config.api.port, config.decode.slots, config.store.save) == (3, 2, "turn")


def test_files_are_looked_for_in_order(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    write(data / "tandem.toml", "[api]\nport = 4")
    assert load(None, {"data_dir": data}).api.port == 4
    monkeypatch.setenv("TANDEM_DATA", str(data))
    assert load().api.port == 4
    write(home / "tandem.toml", "[api]\nport = 3")
    assert load().api.port == 3
    monkeypatch.setenv("TANDEM_CONFIG", str(write(tmp_path / "b.toml", "[api]\nport = 2")))
    assert load().api.port == 2
    assert load(write(tmp_path / "a.toml", "[api]\nport = 1")).api.port == 1


def test_redis_url_yields_to_the_longer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "redis://:p@b")
    monkeypatch.setenv("REDIS_URL", "redis://:p@a")
    assert load().redis_url == "redis://:p@b"
    monkeypatch.delenv("TANDEM_REDIS_URL")
    assert load().redis_url == "redis://:p@a"


def test_empty_variables_of_paths_and_names_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load()
    for name in ("DATA", "MODELS", "NODE", "MODEL", "CONFIG"):
        monkeypatch.setenv(f"TANDEM_{name}", "")
    assert load() == plain


def test_children_run_with_exactly_the_parents_values(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_DECODE_SLOTS", "3")
    parent = load(None, {"api.port": 5, "api.token": "t", "data_dir": Path("relative")})
    assert parent.data_dir == home / "relative"
    monkeypatch.setenv(RESOLVED, resolved_environment(parent)[RESOLVED])
    monkeypatch.setenv("TANDEM_DECODE_SLOTS", "4")
    write(home / "tandem.toml", "nonsense")
    assert load() == parent
    assert load(None, {"api.port": 6}).api.port == 6  # a child's own flag
    explicit = load(write(home / "other.toml", "node = 'b'"))
    assert (explicit.node, explicit.decode.slots) == ("b", 4)


def test_data_directories_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert load().data_dir == Path.home() / ".local" / "share" / "tandem"
    assert load().models_dir == Path.home() / ".cache" / "tandem" / "models"
    monkeypatch.setenv("XDG_DATA_HOME", "/x/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert load().data_dir == Path("/x/data/tandem")
    assert load().models_dir == Path("/x/cache/tandem/models")
    monkeypatch.setattr("sys.platform", "darwin")
    assert load().data_dir == Path.home() / "Library" / "Application Support" / "tandem"
    assert (
        load().models_dir == Path.home() / "Library" / "Application Support" / "tandem" / "models"
    )


def test_names_derived_from_the_configuration(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Config(data_dir=tmp_path / "1"), Config(data_dir=tmp_path / "2", node="m3")
    assert one.runtime_dir != two.runtime_dir
    assert (one.decode_queue, two.decode_queue) == ("decode", "decode-m3")
    assert two.store_socket.name == "store-m3.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert one.runtime_dir.parent == Path("/run/user/7")
    # On a Mac it depends on nothing that differs between a terminal and a daemon of launchd.
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("sys.platform", "darwin")
    places = set()
    for temporary in ("/tmp", "/var/folders/zz/n0000gn/T"):
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr("tempfile.tempdir", None)
        places |= {one.store_socket, socket_path(tmp_path / "1")}
    (place,) = places
    assert place.parent.parent == Path.home() / "Library" / "Application Support" / "tandem" / "run"
    assert len("/Users/sixteen-letters-") - 1 + len(str(place)) - len(str(Path.home())) <= 100
    monkeypatch.setattr("sys.platform", "linux")
    for model, name in {
        "owner/name": "owner/name",
        "/models/GLM": "GLM",
        "~/models/GLM/": "GLM",
        ".": home.name,
        "..": home.parent.name,
        "/": "model",
    }.items():
        assert Config(model=model).model_name == name
    assert Config(api={"host": "::1", "port": 9}).api_url == "http://[::1]:9"
    assert Config(api={"host": "0.0.0.0", "port": 9, "token": "t"}).api_url == "http://127.0.0.1:9"


# --- what is said about wrong ones --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api]\nprot = 1", ["api.prot", "tandem.toml", "port", "max_body_mb"]),
        ("modle = 'x'", ["modle", "model", "data_dir", "store"]),
        ("[apis]\nport = 1", ["apis", "api"]),
        ("[api]\nport = 'many'", ["api.port", "'many'", "integer"]),
        ("[api]\nport = 65536", ["api.port", "65536", "65535"]),
        ("[store]\nsave = 'never'", ["store.save", "'never'", "'idle' or 'turn'"]),
        ("[store]\nsize_gb = 0", ["store.size_gb", "0", "greater than 0"]),
        ("[store]\nsize_gb = nan", ["store.size_gb", "nan", "finite"]),
        ("[prefill]\nchunk = 16", ["prefill.chunk", "16", "0 or at least 17"]),
        ("[prefill]\nsmall_chunk = 1", ["prefill.small_chunk", "0 or at least 17"]),
        ("[link]\nbackend = 'ib'", ["link.backend", "'ib'", "tcp"]),
        ("[redis]\nurl = 'host:6379'", ["redis.url", "'host:6379'", "redis://"]),
        ("[redis]\nurl = 'redis://host:99999'", ["redis.url", "99999", "65535"]),
        ("[redis]\nurl = 'redis://host:x'", ["redis.url", "65535"]),
        ("node = 'My Mac'", ["node", "'My Mac'", "a-z0-9"]),
        ("model = ''", ["model", "1 character"]),
        ("data_dir = ''", ["data_dir", "directory"]),
        ("api = 3", ["api = 3", "section"]),
        ("[api]\nport = \n", ["tandem.toml", "TOML", "line 2"]),
    ],
)
def test_a_wrong_file(home: Path, text: str, words: list[str]) -> None:
    write(home / "tandem.toml", text)
    line = fails()
    assert all(word in line for word in words), line


def test_more_than_one_error_is_counted(home: Path) -> None:
    write(home / "tandem.toml", "[api]\nport = -1\n[decode]\nslots = 0\n[jobs]\nmax_attempts = 0")
    assert "and 2 more" in fails()


def test_files_that_cannot_be_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent.toml"
    assert f"{absent} does not exist: check --config" in fails(absent)
    assert "does not exist" in fails(tmp_path)
    monkeypatch.setenv("TANDEM_CONFIG", str(absent))
    assert "check TANDEM_CONFIG" in fails()
    monkeypatch.delenv("TANDEM_CONFIG")
    (home / "tandem.toml").write_bytes(b"\xff\xfe")
    assert "tandem.toml cannot be read" in fails()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TANDEM_API_PORT", "x", ["api.port", "'x'", "(TANDEM_API_PORT)"]),
        ("TANDEM_NODE", "My Mac", ["node", "(TANDEM_NODE)"]),
        ("REDIS_URL", "localhost", ["redis.url", "(REDIS_URL)"]),
        ("TANDEM_API_PRT", "1", ["api.prt", "(TANDEM_API_PRT)", "port"]),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    line = fails()
    assert all(word in line for word in words), line


def test_a_wrong_flag_is_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_PORT", "1")
    assert "api.port = 70000 in the command line" in fails(None, {"api.port": 70000})


def test_a_section_that_is_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "tandem.toml", "api = 3")
    monkeypatch.setenv("TANDEM_API_PORT", "1")
    assert fails() == "api = 3 is not accepted: it is a section, [api]"


@pytest.mark.parametrize("text", ["{", "[]", "null", ""])
def test_a_broken_hand_over_to_a_child(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RESOLVED, text)
    assert "start the stack again" in fails()


def test_an_older_stacks_hand_over_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESOLVED, json.dumps({"api": {"gone": 1}}))
    monkeypatch.setenv("TANDEM_API_GONE", "1")  # is not what was read
    assert "unknown key api.gone in the configuration of the running stack" in fails()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "mac.local", ""])
def test_other_machines_need_a_token(host: str) -> None:
    line = fails(None, {"api.host": host})
    assert "api.host" in line
    assert "TANDEM_API_TOKEN" in line
    assert load(None, {"api.host": host, "api.token": "t"}).api.host == host


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.a.b")))


def test_secrets_are_not_shown(home: Path) -> None:
    write(home / "tandem.toml", '[redis]\nurl = "http://me:s3cr/et@host"')
    line = fails()
    assert "s3cr" not in line
    assert "me:***@host" in line
    write(home / "tandem.toml", '[api]\ntoken = ["s3cret"]')
    assert "s3cret" not in fails()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:p@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:p@h", "redis://:***@h"),
        ("redis://:p@x/y:z@h", "redis://:***@h"),
        ("unix:///a/b.sock?password=p&db=1", "unix:///a/b.sock?password=***&db=1"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert without_password(url) == shown
