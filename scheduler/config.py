"""Configuration: one `tandem.toml`, then the environment, then flags, checked once.

Precedence, later wins: defaults, file, ``REDIS_URL``, ``TANDEM_<SECTION>_<KEY>``, flags.
A supervisor hands the resolved configuration to its children in ``TANDEM_RESOLVED`` (JSON), so
that every process of a stack runs with exactly the same values.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

RESOLVED = "TANDEM_RESOLVED"
DEFAULT_MODEL = "smollm2-135m-instruct"


class ConfigError(Exception):
    """A setting is wrong; the message names the key, the value and what is accepted."""


def default_data_dir() -> Path:
    """Where state lies unless told otherwise."""
    if env := os.environ.get("TANDEM_DATA"):
        return Path(env)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "tandem"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tandem"


def default_models_dir() -> Path:
    """Where converted and downloaded models lie; shared by all stacks of a user."""
    if env := os.environ.get("TANDEM_MODELS"):
        return Path(env)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tandem" / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "models"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class RedisConfig(_Section):
    url: str = Field("", description="redis:// or unix:// URL; empty: Tandem runs its own server")

    @field_validator("url")
    @classmethod
    def _scheme(cls, value: str) -> str:
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://, or be empty")
        try:
            port = urlsplit(value).port
        except ValueError:
            port = 0
        if port == 0:
            raise ValueError("the port must be a number from 1 to 65535")
        return value


class ApiConfig(_Section):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = 8420
    token: str = Field("", description="bearer token; required when host is not loopback")
    max_body_mb: Annotated[int, Field(ge=1, le=1024)] = 64
    aliases: tuple[str, ...] = Field(
        (), description="names, or patterns such as gpt-*, that stand for the served model as well"
    )

    @field_validator("aliases", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        # An environment variable is one text.
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class PrefillConfig(_Section):
    chunk: Annotated[int, Field(ge=0, le=65536)] = Field(
        0, description="tokens per forward pass; 0: 8192 on Metal, 256 on a CPU"
    )
    small_chunk: Annotated[int, Field(ge=0, le=65536)] = Field(
        0,
        description="tokens per forward pass while a short interactive job waits; "
        "0: 2048 on Metal, on a CPU as the chunk",
    )


class DecodeConfig(_Section):
    slots: Annotated[int, Field(ge=1, le=256)] = Field(8, description="rows decoded at once")
    max_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        512, description="used when a request gives no limit"
    )
    local_prefill_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        2048, description="a longer prompt whose state was lost goes back to the prefill node"
    )


class StoreConfig(_Section):
    size_gb: Annotated[float, Field(gt=0, le=16384)] = Field(8.0, description="cap on disk")
    idle_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        30.0, description="a conversation untouched for this long moves from memory to the store"
    )
    save: Literal["idle", "turn"] = Field("idle", description="when cache state is written")
    hot_gb: Annotated[float, Field(gt=0, le=16384)] = Field(
        4.0, description="memory for conversations between turns and for received state"
    )
    warm_gb: Annotated[float, Field(ge=0, le=16384)] = Field(
        4.0, description="how much of the latest stored states is read into memory after a start"
    )
    owner_gb: Annotated[float, Field(ge=0, le=16384)] = Field(
        0.0, description="stored states of one owner; 0 for no limit"
    )
    daily_gb: Annotated[float, Field(ge=0, le=1048576)] = Field(
        0.0, description="written per day before large snapshots are not saved; 0 for no limit"
    )


class LinkConfig(_Section):
    backend: Literal["auto", "tcp", "rdma"] = Field(
        "auto", description="auto: rdma where it is set up and passes its self-test, else tcp"
    )
    devices: str = Field("", description="file with the cable map for RDMA (JSON)")
    host: str = Field("127.0.0.1", description="address of the link on the decode node")
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    streams: Annotated[int, Field(ge=1, le=16)] = 2
    deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0


class JobsConfig(_Section):
    lease_seconds: Annotated[int, Field(ge=3, le=600)] = 10
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    result_days: Annotated[float, Field(gt=0, le=3650)] = 7.0
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 20.0
    abandon_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        30.0, description="a foreground job whose client has gone is cancelled after this long"
    )
    max_waiting: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        10_000, description="jobs that may wait in one queue; more are refused with 429"
    )
    max_wait_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        0.0, description="interactive jobs with a longer predicted wait get 429; 0: never"
    )
    horizon_seconds: Annotated[float, Field(gt=0, le=86_400)] = Field(
        380.0, description="after about this long a normal job goes before all others"
    )
    interactive_weight: Annotated[float, Field(gt=0, le=100)] = Field(
        0.5, description="below 1: interactive jobs go earlier and age faster"
    )
    batch_weight: Annotated[float, Field(gt=0, le=1000)] = Field(
        4.0, description="above 1: batch jobs go later and age more slowly"
    )
    owner_share: Annotated[float, Field(ge=0, le=100)] = Field(
        1.0, description="how much recent use by an owner counts against its next job"
    )
    preempt_gain: Annotated[float, Field(ge=1, le=1000)] = Field(
        1.25, description="a running prefill is parked for a job that is better by this factor"
    )
    max_parked: Annotated[int, Field(ge=0, le=1000)] = Field(
        4, description="unfinished prefills that may be parked at once; 0: never park"
    )
    parked_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        900.0, description="the finished part of a cancelled prefill is kept for this long"
    )


class DeviceConfig(_Section):
    keepalive_seconds: Annotated[float, Field(ge=-1, le=3600)] = Field(
        -1.0,
        description="seconds between pulses that keep an idle GPU awake; 0: none, "
        "-1: 2 on Metal and none on a CPU",
    )


class Config(_Section):
    """Everything a Tandem process needs to know before it starts."""

    data_dir: Path = Field(default_factory=default_data_dir)
    models_dir: Path = Field(default_factory=default_models_dir)
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
    redis: RedisConfig = Field(default_factory=RedisConfig)
    api: ApiConfig = Field(default_factory=ApiConfig)
    prefill: PrefillConfig = Field(default_factory=PrefillConfig)
    decode: DecodeConfig = Field(default_factory=DecodeConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    link: LinkConfig = Field(default_factory=LinkConfig)
    jobs: JobsConfig = Field(default_factory=JobsConfig)
    device: DeviceConfig = Field(default_factory=DeviceConfig)

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
    def runtime_dir(self) -> Path:
        """Directory of this stack's sockets: short, because macOS allows 104 bytes for a path."""
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        tag = hashlib.blake2b(os.fsencode(self.data_dir), digest_size=4).hexdigest()
        return Path(base) / f"tandem-{os.getuid()}-{tag}"

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
        """URL of the Redis in use: the configured one, or our own server's socket."""
        return self.redis.url or f"unix://{self.redis_socket}?db=0"

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


_SECTIONS = ("redis", "api", "prefill", "decode", "store", "link", "jobs", "device")
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
        found = _find(path, (overrides or {}).get("data_dir"))
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
    if not config.api.token and not is_loopback(config.api.host):
        raise ConfigError(
            f"api.host = {config.api.host!r} is reachable from other machines, and api.token is "
            "empty: set api.token (or TANDEM_API_TOKEN), or listen on 127.0.0.1"
        )
    return config


def without_password(url: str) -> str:
    """`url` as it may be shown: passwords are replaced."""
    url = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)


def resolved_environment(config: Config) -> dict[str, str]:
    """Environment of a child process that runs with exactly this configuration."""
    return {**os.environ, RESOLVED: config.model_dump_json()}


def _find(path: Path | None, data_dir: Any) -> Path | None:
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
