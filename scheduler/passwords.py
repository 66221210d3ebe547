"""Passwords of Redis: read from a file that only its owner may read, never shown."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote, urlsplit, urlunsplit

User = Literal["admin", "api", "worker", "dashboard"]
USERS: tuple[User, ...] = get_args(User)
_RULES: dict[User, str] = {
    "admin": "~* &* +@all",
    # Everything that Tandem and RQ use of their own keys; nothing that reads or changes others'.
    "api": "~rq:* ~tandem:* &rq:* &tandem:* +@all -@admin -@dangerous +info",
    "worker": "~rq:* ~tandem:* &rq:* &tandem:* +@all -@admin -@dangerous +info",
    "dashboard": "%R~rq:* +@read +@connection +info -keys",
}


class ConfigError(Exception):
    """A setting is wrong; the message names the key, the value and what is accepted."""


@dataclass(frozen=True)
class Passwords:
    """The users of a password file; or one password, that of the URL's own user."""

    users: dict[str, str]
    single: str = ""

    @classmethod
    def read(cls, path: Path) -> Passwords:
        """Read the file. Raises ConfigError: missing, open to others, or of another form."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                text = file.read(64 << 10).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text"
            raise ConfigError(
                f"redis.password_file {path} cannot be read ({reason}): run `tandem init`, or "
                "correct the path"
            ) from None
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"redis.password_file {path} can be read by others: run `chmod 600` on it and "
                "change the passwords"
            )
        lines = [line.split() for line in text.splitlines() if line.strip()]
        if len(lines) == 1 and len(lines[0]) == 1:
            return cls({}, lines[0][0])
        if not lines or any(len(line) != 2 or line[0] not in USERS for line in lines):
            raise ConfigError(
                f"redis.password_file {path} is not accepted: one password, or lines "
                f"`user password` with the users {', '.join(USERS)}"
            )
        return cls({line[0]: line[1] for line in lines})

    @classmethod
    def new(cls) -> Passwords:
        """A random password for every user."""
        return cls({name: secrets.token_urlsafe(24) for name in USERS})

    def text(self) -> str:
        """The file's content."""
        return "".join(f"{name} {word}\n" for name, word in self.users.items())

    def acl(self) -> str:
        """An ACL file of Redis for these users; everybody else, the default user too, is off."""
        lines = ["user default off resetpass -@all"]
        for name in USERS:
            if word := self.users.get(name):
                digest = hashlib.sha256(word.encode()).hexdigest()
                lines.append(f"user {name} on #{digest} resetkeys resetchannels {_RULES[name]}")
        return "\n".join(lines) + "\n"


def with_password(url: str, passwords: Passwords, user: User) -> str:
    """`url` with the credentials of `user`; of the worker where the file does not name it."""
    parts = urlsplit(url)
    name, word = parts.username or "", passwords.single
    if passwords.users:
        name = user if user in passwords.users else "worker"
        word = passwords.users.get(name, "")
        if not word:
            raise ConfigError("redis.password_file has no line for the user worker: add one")
    place = parts.netloc.rpartition("@")[2]
    netloc = f"{quote(name, safe='')}:{quote(word, safe='')}@{place}"
    return urlunsplit(parts._replace(netloc=netloc))


def without_password(url: str) -> str:
    """`url` as it may be shown: passwords are replaced."""
    url = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 that never exists half-written. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
