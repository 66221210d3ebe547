"""Service files: a launchd job on macOS, a systemd unit on Linux. Text only; nothing is run here.

One service runs `tandem up`, which supervises the processes of this machine and is the one owner
of what there is once a machine: the data directory, Redis and the wired limit.
"""

from __future__ import annotations

import os
import plistlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

LABEL = "org.tandem.serve"
#: Where a daemon of launchd lies: it starts without a login, and belongs to root.
DAEMON = Path("/Library/LaunchDaemons") / f"{LABEL}.plist"
UNIT = "tandem.service"
#: Beyond the drain: states are written to the store, then Redis writes its file to the end.
STOP_SECONDS = 120
FILES = 65_536
_PATHS = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Plan:
    """What the service runs: `tandem up` with one configuration, as one user."""

    config: Path
    data: Path
    drain_seconds: float
    python: Path = field(default_factory=lambda: Path(sys.executable))

    @property
    def command(self) -> list[str]:
        """The program and its arguments."""
        return [str(self.python), "-P", "-m", "scheduler.cli", "up", "--config", str(self.config)]

    @property
    def log(self) -> Path:
        """Where the supervisor's own output goes; it turns this log over itself."""
        return self.data / "logs" / "service.log"

    @property
    def stop_seconds(self) -> int:
        """How long the service manager must wait before it kills."""
        return int(self.drain_seconds) + STOP_SECONDS


def plist(plan: Plan, user: str = "") -> bytes:
    """A launchd property list: an agent of the user, or with `user` a daemon that runs as them."""
    content = {
        "Label": LABEL,
        "ProgramArguments": plan.command,
        "RunAtLoad": True,
        "KeepAlive": True,
        # A configuration that is refused is tried again twice a minute, not ten times.
        "ThrottleInterval": 30,
        # launchd kills after 20 s otherwise, in the middle of a drain.
        "ExitTimeOut": plan.stop_seconds,
        # Background jobs are slowed down and put to sleep.
        "ProcessType": "Interactive",
        "WorkingDirectory": str(plan.data),
        "StandardOutPath": str(plan.log),
        "StandardErrorPath": str(plan.log),
        "EnvironmentVariables": {"PATH": f"{plan.python.parent}:{_PATHS}"},
        "SoftResourceLimits": {"NumberOfFiles": FILES},
        "Umask": 0o077,
    }
    if user:
        content["UserName"] = user
    return plistlib.dumps(content)


def unit(plan: Plan) -> str:
    """A systemd unit of the user."""
    command = " ".join(_quoted(word) for word in plan.command)
    return f"""\
[Unit]
Description=Tandem
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={_escaped(str(plan.data))}
Environment={_quoted(f"PATH={plan.python.parent}:{_PATHS}")}
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec={plan.stop_seconds}
LimitNOFILE={FILES}
UMask=0077
StandardOutput=append:{_escaped(str(plan.log))}
StandardError=append:{_escaped(str(plan.log))}

[Install]
WantedBy=default.target
"""


def on_mac() -> bool:
    """Whether launchd runs services here, and not systemd."""
    return sys.platform == "darwin"


def place(mac: bool | None = None) -> Path:
    """Where the service file of this user lies."""
    if on_mac() if mac is None else mac:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / UNIT


def installed() -> Path | None:
    """The service file that is in place, a daemon's first; None where none is."""
    found = [DAEMON, place()] if on_mac() else [place()]
    return next((path for path in found if path.exists()), None)


def start_commands(path: Path, mac: bool | None = None) -> list[list[str]]:
    """What makes the service manager run the service, now and at every login."""
    if on_mac() if mac is None else mac:
        return [["launchctl", "bootstrap", f"gui/{os.getuid()}", str(path)]]
    return [
        ["systemctl", "--user", "daemon-reload"],
        ["systemctl", "--user", "enable", "--now", UNIT],
    ]


def stop_commands(mac: bool | None = None) -> list[list[str]]:
    """What stops the service and keeps it from starting again."""
    if on_mac() if mac is None else mac:
        return [["launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}"]]
    return [["systemctl", "--user", "disable", "--now", UNIT]]


def state_command(path: Path | None = None, mac: bool | None = None) -> list[str]:
    """What asks the service manager for the state of the service whose file is `path`."""
    if on_mac() if mac is None else mac:
        domain = "system" if path == DAEMON else f"gui/{os.getuid()}"
        return ["launchctl", "print", f"{domain}/{LABEL}"]
    return ["systemctl", "--user", "is-active", UNIT]


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    plain = word.replace("\\", "\\\\").replace('"', '\\"')
    # "$" would be a variable, "%" a specifier.
    return '"' + _escaped(plain).replace("$", "$$") + '"'
