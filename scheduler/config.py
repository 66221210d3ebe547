"""Configuration: one `tandem.toml`, then the environment, then flags, checked once.

Precedence, later wins: defaults, file, ``REDIS_URL``, ``TANDEM_<SECTION>_<KEY>``, flags.
A supervisor hands the resolved configuration to its children in ``TANDEM_RESOLVED`` (JSON), so
that every process of a stack runs with exactly the same values.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError, field_validator

from scheduler.owners import FILE as OWNERS
from scheduler.passwords import (
    ConfigError,
    Passwords,
    User,
    with_password,
    without_password,
    write_private,
)
from scheduler.sections import (
    ApiConfig,
    DecodeConfig,
    DeviceConfig,
    JobsConfig,
    LinkConfig,
    PrefillConfig,
    RedisConfig,
    RoutingConfig,
    Section,
    StoreConfig,
    UpkeepConfig,
)
from store import paths

__all__ = [
    "Config",
    "ConfigError",
    "DecodeConfig",
    "JobsConfig",
    "LinkConfig",
    "load",
    "without_password",
]

RESOLVED = "TANDEM_RESOLVED"
DEFAULT_MODEL = "smollm2-135m-instruct"
Role = Literal["api", "prefill", "decode"]


def default_data_dir() -> Path:
    """Where state lies unless told otherwise."""
    if env := os.environ.get("TANDEM_DATA"):
        return Path(env)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tandem"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tandem"


class Config(Section):
    """Everything a Tandem process needs to know before it starts."""

    data_dir: Path = Field(default_factory=default_data_dir)
    models_dir: Path = Field(default_factory=paths.models_dir)
    node: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")] = Field(
        "local", description="name of this machine among Tandem's nodes"
    )
    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="name, hub name or directory of the model"
    )
    model_dir: Path | None = Field(
        None,
        description="directory of the model's files; found from `model` at start when not given",
    )
    roles: tuple[Role, ...] = Field(
        (), description="what `tandem up` runs here: api, prefill, decode; empty: all"
    )
    redis: RedisConfig = Field(default_factory=RedisConfig)
    api: ApiConfig = Field(default_factory=ApiConfig)
    prefill: PrefillConfig = Field(default_factory=PrefillConfig)
    decode: DecodeConfig = Field(default_factory=DecodeConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    link: LinkConfig = Field(default_factory=LinkConfig)
    jobs: JobsConfig = Field(default_factory=JobsConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)
    upkeep: UpkeepConfig = Field(default_factory=UpkeepConfig)

    @field_validator("roles", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    @field_validator("data_dir", "models_dir", "model_dir", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value == "":  # would be the current directory
            raise ValueError("a directory is needed, or leave the key out")
        return value

    @field_validator("data_dir", "models_dir", "model_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @property
    def model_name(self) -> str:
        """The name under which the API serves the model: never a path."""
        if not self.model.startswith(("/", "~", ".")):
            return self.model
        return os.path.basename(os.path.abspath(Path(self.model).expanduser())) or "model"

    @property
    def alone(self) -> bool:
        """Whether no other machine can take part: all runs here, with a Redis for this one only."""
        whole = not self.roles or set(self.roles) == set(get_args(Role))
        return whole and not self.redis.url and not self.redis.listen

    @property
    def runtime_dir(self) -> Path:
        """Directory of this stack's sockets."""
        return paths.runtime_dir(self.data_dir)

    @property
    def decode_queue(self) -> str:
        """RQ queue of this node's decode worker."""
        return decode_queue(self.node)

    @property
    def store_socket(self) -> Path:
        return self.runtime_dir / f"store-{self.node}.sock"

    @property
    def redis_socket(self) -> Path:
        return self.runtime_dir / "redis.sock"

    @property
    def redis_url(self) -> str:
        """URL by which workers reach the Redis in use."""
        return self.redis_url_of("worker")

    def redis_url_of(self, user: User) -> str:
        """URL of the Redis in use, the configured one or our own server's socket, as `user`.

        Users and their passwords come from `redis.password_file`, read anew each time; one that
        the file does not name is the worker. Raises ConfigError where the file cannot be used.
        """
        url = self.redis.url or f"unix://{self.redis_socket}?db=0"
        if self.redis.password_file is None:
            return url
        return with_password(url, Passwords.read(self.redis.password_file), user)

    @property
    def api_url(self) -> str:
        host = "127.0.0.1" if self.api.host in ("", "0.0.0.0", "::") else self.api.host
        return (
            f"http://[{host}]:{self.api.port}" if ":" in host else f"http://{host}:{self.api.port}"
        )


def decode_queue(node: str) -> str:
    """RQ queue of the decode worker on `node`."""
    return "decode" if node == "local" else f"decode-{node}"


def is_loopback(host: str) -> bool:
    """True where only processes of this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_SECTIONS = ("redis", "api", "prefill", "decode", "store", "link", "jobs", "routing", "device",
             "upkeep")  # fmt: skip
_PLAIN = {"TANDEM_DATA": "data_dir", "TANDEM_MODELS": "models_dir", "TANDEM_NODE": "node",
          "TANDEM_MODEL": "model"}  # fmt: skip


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Resolve the configuration of this process.

    `overrides` are flags: dotted keys ("api.port") to values; None values are ignored.
    Raises ConfigError with one line that names key, value and what is accepted.
    """
    if path is None and RESOLVED in os.environ:
        tree = _resolved()
        source = f"the configuration of the running stack ({RESOLVED})"
    else:
        found = find_file(path, (overrides or {}).get("data_dir"))
        tree = _read(found) if found else {}
        source = str(found) if found else "the defaults"
        _apply_environment(tree)
    for key, value in (overrides or {}).items():
        if value is not None:
            _set(tree, key.split("."), value)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, overrides or {})) from None
    if not config.api.token and not is_loopback(config.api.host) and not _has_owners(config):
        raise ConfigError(
            f"api.host = {config.api.host!r} is reachable from other machines, and api.token is "
            "empty: set api.token (or TANDEM_API_TOKEN), name owners with `tandem owners add`, or "
            "listen on 127.0.0.1"
        )
    _refuse_open_redis(config)
    return config


def _has_owners(config: Config) -> bool:
    """Whether tokens of owners are asked for; what is in the file is checked by the API."""
    return (config.data_dir / OWNERS).exists()


def _refuse_open_redis(config: Config) -> None:
    """Raise ConfigError where strangers could use Redis, or it would be used without a password."""
    redis = config.redis
    where = redis.listen_address
    if redis.url and where:
        raise ConfigError(
            "redis.listen is for Tandem's own Redis, and redis.url names another: drop one of them"
        )
    if redis.password_file is not None:
        return
    if where and not is_loopback(where[0]):
        raise ConfigError(
            f"redis.listen = {redis.listen!r} is reachable from other machines, and "
            "redis.password_file is empty: run `tandem init`, which makes one, or name one"
        )
    found = urlsplit(redis.url)
    if redis.url.startswith("unix:") or is_loopback(found.hostname or "localhost"):
        return
    if not found.password and "password=" not in found.query:
        raise ConfigError(
            f"redis.url = {redis.url!r} is on another machine and has no password: set "
            "redis.password_file, or put the password into REDIS_URL"
        )


def find_model(config: Config) -> Path | None:
    """The directory of the configured model's files where they are here; nothing is fetched."""
    if config.model_dir is not None:
        return config.model_dir if config.model_dir.is_dir() else None
    for path in (Path(config.model).expanduser(), config.models_dir / config.model):
        if path.is_dir():
            return path.absolute()
    return None


def keep_model(file: Path, name: str) -> None:
    """Write `model = "NAME"` into a configuration file, and change nothing else in it.

    Raises ConfigError where it cannot be written.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        top = next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
        at = [n for n, line in enumerate(lines[:top]) if re.match(r"\s*model\s*=", line)]
        line = f"model = {json.dumps(name)}"
        if at:
            lines[at[0]] = line
        else:
            lines.insert(0, line)
        text = "\n".join(lines) + "\n"
        tomllib.loads(text)
        write_private(file, text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from None


def resolved_environment(config: Config) -> dict[str, str]:
    """Environment of a child process that runs with exactly this configuration."""
    return {**os.environ, RESOLVED: config.model_dump_json()}


def find_file(path: Path | None = None, data_dir: Any = None) -> Path | None:
    """The configuration file in use, None where there is none. Raises ConfigError."""
    named = path or os.environ.get("TANDEM_CONFIG")
    if named:
        if not os.path.isfile(named):
            cause = "--config" if path else "TANDEM_CONFIG"
            raise ConfigError(f"configuration file {named} does not exist: check {cause}")
        return Path(named)
    base = Path(data_dir).expanduser() if data_dir else default_data_dir()
    for candidate in (Path("tandem.toml"), base / "tandem.toml"):
        if os.path.isfile(candidate):  # False too where the directory may not be searched
            return candidate
    return None


def _resolved() -> dict[str, Any]:
    try:
        tree = json.loads(os.environ[RESOLVED])
    except ValueError as error:
        raise ConfigError(f"{RESOLVED} is not JSON ({error}): start the stack again") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{RESOLVED} is not a JSON object: start the stack again")
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _apply_environment(tree: dict[str, Any]) -> None:
    if "REDIS_URL" in os.environ:
        _set(tree, ["redis", "url"], os.environ["REDIS_URL"])
    for name, value in os.environ.items():
        if name in _PLAIN:
            if value:
                _set(tree, [_PLAIN[name]], value)
            continue
        parts = name.lower().split("_", 2)
        if len(parts) == 3 and parts[0] == "tandem" and parts[1] in _SECTIONS:
            _set(tree, parts[1:], value)


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key} = {child!r} is not accepted: it is a section, [{key}]")
        tree = child
    tree[keys[-1]] = str(value) if isinstance(value, Path) else value


def _explain(error: ValidationError, source: str, flags: Mapping[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if flags.get(key) is not None:
        source = "the command line"
    elif RESOLVED not in source and (name := _environment_name(key)):
        source = f"the environment ({name})"
    if first["type"] == "extra_forbidden":
        accepted = ", ".join(_keys(first["loc"][:-1]))
        return f"unknown key {key} in {source}: accepted here are {accepted}"
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        text = f"it is a section, [{key}]"
    more = len(error.errors()) - 1
    tail = f" (and {more} more)" if more else ""
    value = first["input"]
    if key == "api.token":
        value = "***"
    elif key == "redis.url" and isinstance(value, str):
        value = without_password(value)
    return f"{key} = {value!r} in {source} is not accepted: {text}{tail}"


def _environment_name(key: str) -> str | None:
    """The variable of this process that sets `key`, if one does."""
    names = [name for name, plain in _PLAIN.items() if plain == key]
    names += ["REDIS_URL"] if key == "redis.url" else []
    names += ["TANDEM_" + key.upper().replace(".", "_")]
    return next((name for name in names if name in os.environ), None)


def _keys(section: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in section:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)
