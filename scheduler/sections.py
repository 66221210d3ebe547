"""The sections of `tandem.toml`: their keys, defaults and bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """What all sections have in common: unknown keys are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


class RedisConfig(Section):
    """`[redis]`"""

    url: str = Field("", description="redis:// or unix:// URL; empty: Tandem runs its own server")
    password_file: Path | None = Field(
        None,
        description="file of mode 0600: the password of the URL's user, or a line `user password` "
        "for each of admin, api, worker and dashboard",
    )
    listen: str = Field(
        "", description="address:port where Tandem's own server listens for the other machine"
    )

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

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host.strip("[]") and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError("must be address:port, such as 10.0.0.1:6379")
        return value

    @field_validator("password_file", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("password_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().absolute()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Host and port of `listen`, or None."""
        if not self.listen:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class ApiConfig(Section):
    """`[api]`"""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = 8420
    token: str = Field(
        "", description="the operator's token; it or an owner is needed when host is not loopback"
    )
    max_body_mb: Annotated[int, Field(ge=1, le=1024)] = 64
    max_values: Annotated[int, Field(ge=1000, le=100_000_000)] = Field(
        250_000, description="JSON values in one request, or in one line of a batch"
    )
    max_file_mb: Annotated[int, Field(ge=1, le=4096)] = Field(200, description="largest upload")
    max_bundle_mb: Annotated[int, Field(ge=1, le=1_048_576)] = Field(
        4096, description="largest file of a conversation with its state"
    )
    files_gb: Annotated[float, Field(gt=0, le=16384)] = Field(
        4.0, description="all uploaded files, and those that batches write, together"
    )
    batch_lines: Annotated[int, Field(ge=1, le=10_000)] = Field(
        32, description="lines of one batch that wait or run at once"
    )
    dashboard: Literal["read-only", "cancel"] = Field(
        "read-only", description="cancel: its Delete button cancels a job"
    )
    max_images: Annotated[int, Field(ge=0, le=1000)] = Field(16, description="in one request")
    max_images_mb: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="all images of one request together"
    )
    fetch_images: bool = Field(
        False, description="fetch images that a request names by URL, from public addresses"
    )
    aliases: tuple[str, ...] = Field(
        (), description="names, or patterns such as gpt-*, that stand for the served model as well"
    )

    normalise_head: tuple[str, ...] = Field(
        (), description="regular expressions: what they match in a prompt's head is taken out"
    )

    @field_validator("normalise_head", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        # An environment variable is one text; a pattern may hold a comma.
        return [line for line in value.splitlines() if line] if isinstance(value, str) else value

    @field_validator("normalise_head")
    @classmethod
    def _patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                matches_nothing = re.compile(pattern).match("") is not None
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
            if matches_nothing:
                raise ValueError(f"{pattern!r} matches nothing at all: say what it is to match")
        return value

    @field_validator("aliases", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        # An environment variable is one text.
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


LEAST_CHUNK = 17
"""Tokens of the shortest forward that a prompt may be cut into (`engine.prefill.MIN_CHUNK`)."""


def _long_enough(value: int) -> int:
    if 0 < value < LEAST_CHUNK:
        raise ValueError(f"must be 0 or at least {LEAST_CHUNK}")
    return value


Chunk = Annotated[int, Field(ge=0, le=65536), AfterValidator(_long_enough)]


class PrefillConfig(Section):
    """`[prefill]`"""

    chunk: Chunk = Field(0, description="tokens per forward pass; 0: 8192 on Metal, 256 on a CPU")
    small_chunk: Chunk = Field(
        0,
        description="tokens per forward pass while a short interactive job waits; "
        "0: 2048 on Metal, on a CPU as the chunk",
    )
    handoff: Literal["late", "prompt"] = Field(
        "late",
        description="late: while no prompt waits, and this node decodes at least as fast by the "
        "measured profiles, it begins the answer itself; prompt: every state is handed off at "
        "its prompt's end",
    )


class DecodeConfig(Section):
    """`[decode]`"""

    slots: Annotated[int, Field(ge=1, le=256)] = Field(8, description="rows decoded at once")
    max_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        512, description="used when a request gives no limit"
    )
    local_prefill_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        2048, description="a longer prompt whose state was lost goes back to the prefill node"
    )
    drafter: str = Field(
        "auto",
        min_length=1,
        description="proposes tokens to verify together: auto (the model's own prediction head, "
        "else ngram), off, ngram, mtp, or a directory with a head or a smaller model",
    )
    draft_tokens: Annotated[int, Field(ge=1, le=7)] = Field(
        3, description="tokens that are proposed at once"
    )


class StoreConfig(Section):
    """`[store]`"""

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
    snapshots: Annotated[int, Field(ge=0, le=64)] = Field(
        4,
        description="states stored inside one prompt beside its preamble's, for edits and branches",
    )
    balance_above: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="with more of the store in use than this share, idle conversations go to other "
        "decode nodes that have room; 0: only by `tandem node balance`",
    )
    rpc_host: str = Field(
        "", description="address where an API on another machine asks the store; empty: none may"
    )
    rpc_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="its port; 0 takes a free one"
    )


class LinkConfig(Section):
    """`[link]`"""

    backend: Literal["auto", "tcp", "rdma"] = Field(
        "auto", description="auto: rdma where it is set up and passes its self-test, else tcp"
    )
    devices: str = Field("", description="file with the cable map for RDMA (JSON)")
    host: str = Field("127.0.0.1", description="address of the link on the decode node")
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    streams: Annotated[int, Field(ge=1, le=16)] = 2
    deadline_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0


class JobsConfig(Section):
    """`[jobs]`"""

    lease_seconds: Annotated[int, Field(ge=3, le=600)] = 10
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    result_days: Annotated[float, Field(gt=0, le=3650)] = 7.0
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 20.0
    abandon_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        30.0,
        description="a foreground job whose clients have all gone is cancelled after this long",
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


class RoutingConfig(Section):
    """`[routing]`"""

    extend: Literal["auto", "decode", "prefill"] = Field(
        "auto",
        description="where a long new turn of a stored conversation is computed: at the decode "
        "node, which has its state; at the prefill node, to which the state goes and from which "
        "what is new comes back; auto: whichever is sooner by the measured rates",
    )


class DeviceConfig(Section):
    """`[device]`"""

    keepalive_seconds: Annotated[float, Field(ge=-1, le=3600)] = Field(
        -1.0,
        description="seconds between pulses that keep an idle GPU awake; 0: none, "
        "-1: 2 on Metal and none on a CPU",
    )


class UpkeepConfig(Section):
    """`[upkeep]`"""

    check_hour: Annotated[int, Field(ge=-1, le=23)] = Field(
        3, description="local hour at which the store is checked every night; -1: never"
    )
    keep_reports: Annotated[int, Field(ge=1, le=3650)] = Field(
        30, description="reports of nightly checks that are kept"
    )
    log_mb: Annotated[int, Field(ge=1, le=10_000)] = Field(
        16, description="size at which a log is turned over"
    )
    log_files: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="earlier logs of each process that are kept"
    )
    low_disk_gb: Annotated[float, Field(ge=0, le=16384)] = Field(
        2.0, description="below this much free disk, states are no longer saved"
    )
