"""Owners: who may use this Tandem, by which tokens, and how much of it.

They stand in `owners.json` in the data directory, a file for its user alone that holds digests of
tokens, never tokens. A token is 32 random bytes, so a plain SHA-256 of it gives nothing away. The
file is read again when it changes: adding or removing an owner needs no restart.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

log = logging.getLogger("tandem.owners")

FILE = "owners.json"
MARK = "@"
"""Stands before an owner's name in records, so that no name a client claims can equal one."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_TOKEN = "tdm_"
_MAX_FILE = 4 << 20


class OwnersError(Exception):
    """The file of owners cannot be used or changed; one line with cause and cure."""

    exit_status = 2


class Owner(BaseModel):
    """One owner. Limits of 0 mean none. `operator`: sees the dashboards, which show all owners."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    tokens: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()
    operator: bool = False
    max_waiting: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    stored_gb: Annotated[float, Field(ge=0, le=1_048_576, allow_inf_nan=False)] = 0.0
    per_minute: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    created: float = 0.0

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "a name has 1 to 63 small letters, digits, '.', '_' and '-', and begins with one "
                "of the first two"
            )
        return value

    @property
    def key(self) -> str:
        """The owner as records have it."""
        return MARK + self.name

    @property
    def stored_bytes(self) -> int:
        """Bytes that may be stored; 0 for no limit."""
        return int(self.stored_gb * 1e9)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    owners: list[Owner] = Field(default_factory=list, max_length=10_000)

    @field_validator("owners")
    @classmethod
    def _distinct(cls, owners: list[Owner]) -> list[Owner]:
        if len({owner.name for owner in owners}) < len(owners):
            raise ValueError("two owners have the same name")
        return owners


def digest(token: str) -> str:
    """What the file keeps of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def claimed(name: str | None) -> str:
    """A name that a client gives itself, which can never be that of an owner with a token."""
    return (name or "").lstrip(MARK)


class Owners:
    """The owners of one data directory. Thread-safe; cheap to ask, for the file is kept parsed."""

    def __init__(self, data_dir: Path) -> None:
        """Reads the file. Raises OwnersError where there is one that cannot be used."""
        self.path = data_dir / FILE
        self._seen: tuple[int, int, int] | None = None
        self._owners: tuple[Owner, ...] = ()
        self._load()

    def list(self) -> tuple[Owner, ...]:
        """All owners as they are now; as they were where the file has been damaged since."""
        try:
            self._load()
        except OwnersError as error:
            log.error("%s; the owners stay as they were", error)
        return self._owners

    def find(self, token: str) -> Owner | None:
        """Whose token this is. Takes as long for a wrong one as for any other."""
        given, found = digest(token), None
        for owner in self.list():
            for known in owner.tokens:
                if hmac.compare_digest(given, known):
                    found = owner
        return found

    def by_key(self, key: str) -> Owner | None:
        """The owner that records call `key`."""
        return next((owner for owner in self.list() if owner.key == key), None)

    def _load(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._seen, self._owners = None, ()
            return
        except OSError as error:
            raise OwnersError(f"{self.path} cannot be read: {error.strerror}") from None
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            self._owners = tuple(_read(self.path).owners)
            self._seen = seen


def add(
    data_dir: Path,
    name: str,
    *,
    operator: bool | None = None,
    max_waiting: int | None = None,
    stored_gb: float | None = None,
    per_minute: int | None = None,
) -> str:
    """Give `name` a new token, which is returned and kept nowhere. Raises OwnersError.

    A new owner is made; one that exists keeps its other tokens, and its limits where None is given.
    """
    token = _TOKEN + secrets.token_urlsafe(32)
    given = {
        "operator": operator,
        "max_waiting": max_waiting,
        "stored_gb": stored_gb,
        "per_minute": per_minute,
    }
    with _changing(data_dir) as file:
        old = next((owner for owner in file.owners if owner.name == name), None)
        fields = old.model_dump() if old else {"name": name, "created": time.time()}
        fields |= {key: value for key, value in given.items() if value is not None}
        fields["tokens"] = (*(old.tokens if old else ()), digest(token))
        try:
            new = Owner.model_validate(fields)
        except ValidationError as error:
            raise OwnersError(_why(error)) from None
        file.owners = [new if owner is old else owner for owner in file.owners]
        if old is None:
            file.owners.append(new)
    return token


def remove(data_dir: Path, name: str) -> None:
    """Take an owner's tokens away; what it has stored stays. Raises OwnersError."""
    with _changing(data_dir) as file:
        left = [owner for owner in file.owners if owner.name != name]
        if len(left) == len(file.owners):
            raise OwnersError(f"there is no owner {name!r}: see `tandem owners list`")
        file.owners = left


@contextmanager
def _changing(data_dir: Path) -> Iterator[_File]:
    """The file's contents, written back whole; one at a time changes it."""
    path = data_dir / FILE
    lock = os.open(data_dir / (FILE + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = _read(path) if path.exists() else _File()
        yield file
        descriptor, name = tempfile.mkstemp(dir=data_dir, prefix=FILE)  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            json.dump(file.model_dump(mode="json"), out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    finally:
        os.close(lock)


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise OwnersError(f"{path} can be read by others: chmod 600 it")
            text = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise OwnersError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > _MAX_FILE:
        raise OwnersError(f"{path} has more than {_MAX_FILE} bytes: it is no file of owners")
    try:
        return _File.model_validate_json(text)
    except ValidationError as error:
        raise OwnersError(f"{path} is not a file of owners: {_why(error)}") from None


def _why(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text
