"""What `tandem init` writes: the configuration of a machine, its secrets, the string for the other.

Secrets are made once and kept: initialising again with `force` rewrites the configuration and
leaves the passwords, so that the other machine's stay right.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import secrets
import shutil
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scheduler.config import Config, ConfigError
from scheduler.host.data_dir import make_private, make_usable
from scheduler.passwords import Passwords, write_private

Setup = Literal["both", "decode", "prefill"]
REDIS_PORT = 6379
_PREFIX = "tandem1-"
_GB = 1e9


@dataclass(frozen=True)
class Join:
    """What the prefill machine must know of the other: handed over as one string."""

    host: str
    port: int
    password: str
    model: str

    def text(self) -> str:
        """One word, safe to paste; it contains a password."""
        fields = [self.host, self.port, self.password, self.model]
        body = json.dumps(fields, separators=(",", ":")).encode()
        check = zlib.crc32(body).to_bytes(4, "big")
        return _PREFIX + base64.urlsafe_b64encode(check + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Join:
        """The string, or the path of a file that holds it. Raises ConfigError."""
        word = text.strip()
        if not word.startswith(_PREFIX):
            try:
                word = Path(word).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise ConfigError(
                    f"--join: {text.strip()[:60]!r} is neither a join string, which begins with "
                    f"{_PREFIX}, nor a file: take what `tandem init` printed on the other machine"
                ) from None
        try:
            raw = base64.urlsafe_b64decode(word.removeprefix(_PREFIX) + "===")
            check, body = raw[:4], raw[4:]
            if not word.startswith(_PREFIX) or zlib.crc32(body).to_bytes(4, "big") != check:
                raise ValueError
            host, port, password, model = json.loads(body)
            return cls(str(host), int(port), str(password), str(model))
        except (ValueError, TypeError):
            raise ConfigError(
                "--join: the join string is damaged: copy all of what `tandem init` printed on "
                "the other machine"
            ) from None


@dataclass(frozen=True)
class Wishes:
    """What `tandem init` was told. `link`: this machine's address on the cable."""

    role: Setup
    data: Path
    file: Path
    model: str
    link: str = ""
    join: Join | None = None
    name: str = ""
    models: Path | None = None
    port: int = 0
    api: str = ""


def write(wishes: Wishes, *, force: bool = False) -> list[Path]:
    """Write configuration and secrets; returns the files. Raises ConfigError."""
    _check(wishes)
    if wishes.file.exists() and not force:
        raise ConfigError(
            f"{wishes.file} exists already: edit it, or write it anew with --force (the passwords "
            "are kept)"
        )
    make_usable(wishes.data)
    make_private(wishes.data / "secrets")
    written = []
    passwords = wishes.data / "secrets" / "redis"
    try:
        if wishes.role == "decode" and not passwords.exists():
            write_private(passwords, Passwords.new().text())
            written.append(passwords)
        if wishes.join is not None:
            write_private(passwords, f"worker {wishes.join.password}\n")
            written.append(passwords)
        token = _token(wishes)
        wishes.file.parent.mkdir(parents=True, exist_ok=True)
        write_private(wishes.file, text(wishes, passwords, token))
    except OSError as error:
        raise ConfigError(f"{error.filename or wishes.file} cannot be written: {error}") from None
    return [*written, wishes.file]


def join_for(config: Config) -> Join:
    """The string for the other machine, from this one's configuration. Raises ConfigError."""
    where = config.redis.listen_address
    if where is None or config.redis.password_file is None:
        raise ConfigError(
            "this machine's configuration has no redis.listen and redis.password_file: run "
            "`tandem init --role decode` here"
        )
    word = Passwords.read(config.redis.password_file).users.get("worker", "")
    return Join(where[0], where[1], word, config.model_name)


def text(wishes: Wishes, passwords: Path, token: str = "") -> str:
    """The content of `tandem.toml`."""
    lines = ["# Written by `tandem init`; every key is explained in the README of Tandem.", ""]
    if wishes.role != "both":
        roles = ["api", "decode"] if wishes.role == "decode" else ["prefill"]
        lines += [f"roles = {json.dumps(roles)}"]
    lines += [f"model = {json.dumps(wishes.model)}", f"data_dir = {json.dumps(str(wishes.data))}"]
    if wishes.models is not None:
        lines += [f"models_dir = {json.dumps(str(wishes.models))}"]
    if wishes.name:
        lines += [f"node = {json.dumps(wishes.name)}"]
    if wishes.role == "decode":
        lines += ["", "[redis]", "# On the cable's address; each role has a user of its own."]
        lines += [f'listen = "{_bracketed(wishes.link)}:{wishes.port or REDIS_PORT}"']
        lines += [f"password_file = {json.dumps(str(passwords))}"]
    elif wishes.join is not None:
        join = wishes.join
        lines += ["", "[redis]", f'url = "redis://{_bracketed(join.host)}:{join.port}/0"']
        lines += [f"password_file = {json.dumps(str(passwords))}"]
    if wishes.link:
        lines += ["", "[link]", "# This machine's address on the cable between the two."]
        lines += [f'host = "{wishes.link}"']
    if wishes.role != "prefill":
        lines += ["", "[store]", "# Half of what the disk has free now, at most 300."]
        lines += [f"size_gb = {store_gb(wishes.data)}"]
        lines += ["# An eighth of the memory, for conversations between two turns."]
        lines += [f"hot_gb = {hot_gb()}"]
        if wishes.api:
            lines += ["", "[api]", f'host = "{wishes.api}"', f"token = {json.dumps(token)}"]
    return "\n".join(lines) + "\n"


def store_gb(data: Path) -> int:
    """A cap for the store: half of the free disk, from 1 to 300 GB."""
    at = data
    while not at.exists():
        at = at.parent
    return max(1, min(300, int(shutil.disk_usage(at).free / 2 / _GB)))


def hot_gb() -> int:
    """An eighth of this machine's memory in GB, at least 1."""
    return max(1, int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 8 / _GB))


def _check(wishes: Wishes) -> None:
    if wishes.role == "prefill" and wishes.join is None:
        raise ConfigError(
            "--role prefill needs --join with the string that `tandem init --role decode` printed "
            "on the other machine"
        )
    if wishes.role != "prefill" and wishes.join is not None:
        raise ConfigError(
            "--join is for --role prefill: the other machine gives the string; the README says how "
            "a further decode node is set up"
        )
    if wishes.role != "both":
        _address("--link", wishes.link)
        if wishes.link and ipaddress.ip_address(wishes.link).is_unspecified:
            raise ConfigError(
                f"--link {wishes.link} would listen on every network: give this machine's address "
                "on the cable, such as 10.0.0.1"
            )


def _address(flag: str, value: str) -> None:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ConfigError(
            f"{flag} {value!r} is not an IP address: give this machine's own on the cable, such "
            "as 10.0.0.1"
        ) from None


def _token(wishes: Wishes) -> str:
    """The API's token: an earlier one is kept."""
    if not wishes.api:
        return ""
    earlier: dict[str, Any] = {}
    if wishes.file.exists():
        try:
            earlier = tomllib.loads(wishes.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            earlier = {}
    kept = earlier.get("api", {}).get("token", "") if isinstance(earlier.get("api"), dict) else ""
    return str(kept) or secrets.token_urlsafe(24)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
