"""`tandem init` and the Redis it sets up: users, addresses, passwords, TLS and tunnels."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from ports_kit import own_port
from redis.exceptions import NoPermissionError
from redis_kit import eventually

from scheduler import cli
from scheduler.config import Config, ConfigError, load, resolved_environment
from scheduler.host import data_dir, setup
from scheduler.host.redis_server import RedisUnavailable, probe
from scheduler.passwords import USERS, Passwords, write_private


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without settings, in a directory with a short path."""
    for name in [n for n in os.environ if n.startswith("TANDEM_") or n == "REDIS_URL"]:
        monkeypatch.delenv(name)
    path = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setenv("TANDEM_DATA", str(path / "one"))
    monkeypatch.chdir(path)
    yield path
    shutil.rmtree(path)


def init(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert cli.main(["init", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def decode(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    port = str(own_port())
    words = ("--role", "decode", "--link", "127.0.0.1", "--port", port, "--model", "m")
    return init(capsys, *words, *more)


# --- what is written ------------------------------------------------------------------------------


def test_both_machines_understand_each_other(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = decode(capsys)
    one = load(home / "one" / "tandem.toml")
    assert one.roles == ("api", "decode")
    assert one.link.host == "127.0.0.1"
    passwords = Passwords.read(home / "one" / "secrets" / "redis")
    assert set(passwords.users) == set(USERS)
    assert len(set(passwords.users.values())) == len(USERS)
    join = str(found["join"])
    init(capsys, "--role", "prefill", "--link", "127.0.0.2", "--join", join, "--data", "two")
    two = load(home / "two" / "tandem.toml")
    assert two.roles == ("prefill",)
    assert two.model == one.model == "m"
    assert two.node != one.node
    assert two.redis.url.endswith(f"{one.redis.listen}/0")
    user = one.redis_url_of("worker").split("@")[0].removeprefix("unix")
    assert two.redis_url_of("worker").split("@")[0] == f"redis{user}"
    assert Passwords.read(home / "two" / "secrets" / "redis").users.keys() == {"worker"}
    assert passwords.users["admin"] not in join


def test_everything_that_is_secret_is_private(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode(capsys, "--api", "127.0.0.1")
    for path in (home / "one").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    text = (home / "one" / "tandem.toml").read_text()
    for word in Passwords.read(home / "one" / "secrets" / "redis").users.values():
        assert word not in text


def test_again_keeps_the_secrets(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decode(capsys, "--api", "127.0.0.1")
    before = (home / "one" / "secrets" / "redis").read_text()
    token = load().api.token
    assert cli.main(["init", "--role", "both"]) == 2
    assert "--force" in capsys.readouterr().err
    port = str(load().redis.listen_address[1])  # type: ignore[index]
    decode(capsys, "--force", "--port", port, "--api", "127.0.0.1")
    assert (home / "one" / "secrets" / "redis").read_text() == before
    assert load().api.token == token
    assert cli.main(["init", "--show-join"]) == 0
    assert capsys.readouterr().out.strip() == first["join"]
    elsewhere = (home / "one" / "tandem.toml").rename(home / "elsewhere.toml")
    monkeypatch.setenv("TANDEM_CONFIG", str(elsewhere))
    assert cli.main(["init", "--show-join"]) == 0
    assert capsys.readouterr().out.strip() == first["join"]
    assert cli.main(["init", "--role", "both"]) == 0
    written = home / "one" / "tandem.toml"
    assert f"tandem up --config {written}" in capsys.readouterr().out  # TANDEM_CONFIG wins else


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--role", "decode", "--link", "0.0.0.0"], ["every network"]),
        (["--role", "decode", "--link", "m3.local"], ["not an IP address"]),
        (["--role", "prefill", "--link", "10.0.0.2"], ["--join"]),
        (["--role", "prefill", "--link", "10.0.0.2", "--join", "tandem1-xyz"], ["damaged"]),
        (["--role", "prefill", "--link", "10.0.0.2", "--join", "no/such/file"], ["neither a join"]),
        (["--role", "both", "--join", "tandem1-xyz"], ["damaged"]),
        (["--role", "both", "--model", "nosuch"], ["'nosuch' is neither", "--model DIR"]),
        ([], ["--role", "nobody can be asked"]),
    ],
    ids=["any", "name", "alone", "damaged", "nothing", "both", "model", "silent"],
)
def test_what_is_not_accepted(
    words: list[str], said: list[str], home: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert cli.main(["init", *words]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1
    assert all(word in line for word in said)
    assert not (home / "one" / "tandem.toml").exists()


def test_a_model_that_only_the_other_machine_may_have_is_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", "--role", "decode", "--link", "127.0.0.1", "--model", "m"]
    assert cli.main(words) == 0
    assert "run there, once both run: tandem model push m" in capsys.readouterr().out
    (home / "models" / "m").mkdir(parents=True)
    assert cli.main([*words, "--models", str(home / "models"), "--force"]) == 0
    assert "push" not in capsys.readouterr().out


def test_it_asks_who_is_there(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["decode", "127.0.0.1", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert cli.main(["init"]) == 0
    assert load().roles == ("api", "decode")
    assert "tandem init --role prefill" in capsys.readouterr().out


def test_a_join_string_that_lost_a_letter(home: Path) -> None:
    text = setup.Join("10.0.0.1", 6379, "word", "m").text()
    assert setup.Join.parse(text) == setup.Join("10.0.0.1", 6379, "word", "m")
    for cut in (text[:-1], text[:20] + text[21:], text.replace("tandem1", "tandem9")):
        with pytest.raises(ConfigError):
            setup.Join.parse(cut)


# --- who may do what ------------------------------------------------------------------------------


@contextmanager
def serving(config: Config) -> Iterator[None]:
    """Our server as the supervisor starts it."""
    data_dir.prepare(config)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "scheduler.host.redis_server"],
        env=resolved_environment(config),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        probe(config.redis_url, 60)
        yield
    finally:
        server.terminate()
        assert server.wait() == 0


def as_user(config: Config, user: str) -> redis.Redis:
    """A client over TCP, as on the other machine."""
    host, port = config.redis.listen_address or ("", 0)
    assert config.redis.password_file is not None
    word = Passwords.read(config.redis.password_file).users[user]
    return redis.Redis(host=host, port=port, username=user, password=word)


def test_each_role_may_do_its_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode(capsys)
    config = load()
    with serving(config):
        for user in ("api", "worker"):
            with as_user(config, user) as client:
                client.set(f"tandem:{user}", 1)
                client.rpush("rq:queue:x", "a")
                assert client.eval("return redis.call('GET', KEYS[1])", 1, f"tandem:{user}") == b"1"
                for forbidden in (
                    lambda c: c.set("somebody:else", 1),
                    lambda c: c.flushall(),
                    lambda c: c.config_get("*"),
                    lambda c: c.keys("*"),
                    lambda c: c.acl_list(),
                    lambda c: c.shutdown(nosave=True),
                ):
                    with pytest.raises(NoPermissionError):
                        forbidden(client)
        with as_user(config, "dashboard") as client:
            assert client.lrange("rq:queue:x", 0, -1) == [b"a", b"a"]
            for forbidden in (
                lambda c: c.get("tandem:worker"),
                lambda c: c.rpush("rq:queue:x", "b"),
                lambda c: c.delete("rq:queue:x"),
            ):
                with pytest.raises(NoPermissionError):
                    forbidden(client)
        host, port = config.redis.listen_address or ("", 0)
        with redis.Redis(host=host, port=port) as stranger, pytest.raises(redis.RedisError):
            stranger.ping()
        with redis.Redis(unix_socket_path=str(config.redis_socket)) as stranger:  # noqa: SIM117
            with pytest.raises(redis.RedisError):
                stranger.ping()
        with as_user(config, "admin") as client:
            assert client.config_get("port")["port"] == str(port)


def test_a_server_that_others_reach_needs_passwords(home: Path) -> None:
    (home / "a.toml").write_text('[redis]\nlisten = "10.0.0.1:6379"\n')
    with pytest.raises(ConfigError, match=r"redis\.password_file is empty: run `tandem init`"):
        load(home / "a.toml")
    (home / "b.toml").write_text('[redis]\nurl = "redis://10.0.0.1:6379/0"\n')
    with pytest.raises(ConfigError, match="is on another machine and has no password"):
        load(home / "b.toml")
    (home / "c.toml").write_text('[redis]\nurl = "redis://:x@h"\nlisten = "127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match="drop one of them"):
        load(home / "c.toml")
    for wrong in ("10.0.0.1", "10.0.0.1:0", ":6379", "h:x"):
        (home / "d.toml").write_text(f'[redis]\nlisten = "{wrong}"\n')
        with pytest.raises(ConfigError, match=r"redis\.listen"):
            load(home / "d.toml")


def test_a_password_file_is_private_and_of_one_form(home: Path) -> None:
    path = home / "words"
    config = Config(redis={"url": "redis://10.0.0.1/0", "password_file": path})
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = config.redis_url
    write_private(path, "s3/cr:et@\n")
    assert config.redis_url == "redis://:s3%2Fcr%3Aet%40@10.0.0.1/0"
    write_private(path, "worker a\napi b\n")
    assert config.redis_url == "redis://worker:a@10.0.0.1/0"
    assert config.redis_url_of("api") == "redis://api:b@10.0.0.1/0"
    assert config.redis_url_of("admin") == config.redis_url
    for text in ("", "worker\napi b\n", "nobody a\n", "api b\n"):
        write_private(path, text)
        with pytest.raises(ConfigError):
            _ = config.redis_url
    write_private(path, "worker a\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        _ = config.redis_url


# --- through TLS, and through a tunnel ------------------------------------------------------------


@contextmanager
def forwarding(target: tuple[str, int], context: ssl.SSLContext | None) -> Iterator[int]:
    """A port that leads to `target`: an SSH tunnel's end, or with `context` a TLS end."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                ended.append(end)

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            ended.append(near)
            try:
                near = context.wrap_socket(near, server_side=True) if context else near
                far = socket.create_connection(target)
            except OSError:
                continue
            for pair in ((near, far), (far, near)):
                threads.append(threading.Thread(target=copy, args=pair, daemon=True))
                threads[-1].start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (server, *threads):
            thread.join(10)
        for end in ended:
            end.close()


def test_redis_through_a_tunnel_and_through_tls(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode(capsys)
    config = load()
    where = config.redis.listen_address
    assert where is not None
    words = str(config.redis.password_file)
    with serving(config), forwarding(where, None) as port:
        tunnel = Config(redis={"url": f"redis://127.0.0.1:{port}/0", "password_file": words})
        assert probe(tunnel.redis_url, 60)
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not here to make a certificate")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout",
             "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain("cert.pem", "key.pem")
        with forwarding(where, context) as secure:
            url = f"rediss://127.0.0.1:{secure}/0"
            trusted = Config(
                redis={
                    "url": f"{url}?ssl_ca_certs={home}/cert.pem",
                    "password_file": words,
                }
            )
            assert probe(trusted.redis_url, 60)
            unknown = Config(redis={"url": url, "password_file": words})

            def refused() -> bool:
                # Both ends are in this process: one that is held up answers nothing in time.
                with pytest.raises(RedisUnavailable) as caught:
                    probe(unknown.redis_url, 0.0)
                return "certificate verify failed" in str(caught.value)

            eventually(refused, "a certificate that nobody has signed is taken for a silence")
            plain = Config(redis={"url": f"redis://127.0.0.1:{secure}/0", "password_file": words})
            with pytest.raises(RedisUnavailable):
                probe(plain.redis_url, 0.0)
