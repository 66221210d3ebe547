"""`tandem service`: run `tandem up` at every login or boot, see how it stands, read its logs."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from scheduler.command.flags import config_flags, config_of, json_flag
from scheduler.config import Config, ConfigError, find_file
from scheduler.host import data_dir, logs, service
from scheduler.host.stack import ROLES
from scheduler.passwords import write_private

_TEXT = """\
Let the service manager of this machine (launchd, systemd) run `tandem up`: now, after a crash and
at every login.

  tandem service install          write the service file and start it
  tandem service status           whether it runs, and the last line of each log
  tandem service logs decode -f   follow a log; without a name all of them
  tandem service uninstall        stop it and remove the file; data stays

A launchd agent starts when you log in, and macOS lets it reach the other machine only once you
have allowed that in a dialogue. --system writes a daemon instead, which needs neither, and prints
the two commands that need sudo: the better one on two Macs. On Linux, `loginctl enable-linger` lets
the service run without a login.
"""
COMMAND_SECONDS = 180.0
NO_DOMAIN = 125
"""What launchctl says of a domain that is not there, as that of a user who is not logged in."""
NO_BUS = "Failed to connect to"
"""What systemctl says where the user has no service manager: no login has started one."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `service` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "service",
        help="run at every login, or at every boot (--system)",
        description=_TEXT,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="service_command", required=True, metavar="COMMAND")
    for name, text, run in (
        ("install", "write the service file and start the service", install),
        ("status", "how the service stands", status),
        ("uninstall", "stop the service and remove its file", uninstall),
        ("logs", "show or follow the logs", show_logs),
    ):
        command = commands.add_parser(name, help=text, description=text)
        config_flags(command)
        command.set_defaults(run=run)
        if name == "install":
            command.add_argument("--no-start", action="store_true", help="only write the file")
            command.add_argument("--system", action="store_true", help="a launchd daemon (macOS)")
            command.add_argument("--output", type=Path, metavar="FILE", help="write it there")
        if name == "status":
            json_flag(command)
        if name == "logs":
            command.add_argument("name", nargs="?", help="service, redis, api, prefill or decode")
            command.add_argument("-n", "--lines", type=int, default=20)
            command.add_argument("-f", "--follow", action="store_true")


def install(args: argparse.Namespace) -> int:
    """Write the service file; start it unless told otherwise."""
    config, file = _configuration(args)
    if file is None:
        raise ConfigError("a service needs a configuration file: run `tandem init` first")
    data_dir.prepare(config)
    mac = service.on_mac()
    plan = service.Plan(file.absolute(), config.data_dir, config.jobs.drain_seconds)
    if args.system and not mac:
        raise ConfigError("--system is for macOS; here run `loginctl enable-linger`")
    path = args.output or (
        config.data_dir / f"{service.LABEL}.plist" if args.system else service.place(mac)
    )
    content = (
        service.plist(plan, getpass.getuser() if args.system else "").decode()
        if mac
        else service.unit(plan)
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    print(f"wrote {path}")
    if args.system:
        print("start it at every boot, whether somebody logs in or not:\n")
        print(f"  sudo install -o root -g wheel -m 644 '{path}' {service.DAEMON}")
        print(f"  sudo launchctl bootstrap system {service.DAEMON}")
        return 0
    if args.no_start or args.output:
        return 0
    if mac:
        _unload(plan)
    for command in service.start_commands(path, mac):
        _run(command)
    print("started; `tandem service status` tells how it stands")
    if mac and config.roles and len(config.roles) < len(ROLES):
        print(
            "macOS asks whether it may find devices on the local network: allow it (System "
            "Settings, Privacy & Security, Local Network). Until then it cannot reach the other "
            "machine. A daemon is not asked: `tandem service install --system`"
        )
    return 0


def _unload(plan: service.Plan) -> None:
    """Have launchd forget an earlier service of ours: it refuses a second one of the same name."""
    for command in service.stop_commands(mac=True):
        _run(command, fatal=False)
    end = time.monotonic() + plan.stop_seconds
    asking = service.state_command(mac=True)
    while _status(asking) == 0:  # it drains; `bootout` does not always wait for that
        if time.monotonic() > end:
            raise ConfigError("the earlier service does not stop: look at `tandem service logs`")
        time.sleep(0.2)


def uninstall(args: argparse.Namespace) -> int:
    """Stop the service and remove its file."""
    path = service.installed()
    if path is None:
        raise ConfigError(f"no service is installed: there is no {service.place()}")
    if path == service.DAEMON:
        print("it is a daemon, which root must stop and remove:\n")
        print(f"  sudo launchctl bootout system/{service.LABEL}")
        print(f"  sudo rm {path}")
        return 0
    for command in service.stop_commands():
        _run(command, fatal=False)
    path.unlink()
    print(f"removed {path}; data and configuration stay")
    return 0


def status(args: argparse.Namespace) -> int:
    """What the service manager, the data directory and the API say; 1 where nothing runs."""
    config, _ = _configuration(args)
    path = service.installed()
    owner = data_dir.owner(config.data_dir)
    found = {
        "installed": str(path or ""),
        "manager": _ask(service.state_command(path)) if path else "",
        "running": owner is not None,
        "process": owner,
        "api": config.api_url if "api" in (config.roles or ("api",)) else "",
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(f"installed  {found['installed'] or 'no (tandem service install)'}")
        if found["manager"]:
            print(f"manager    {found['manager']}")
        print(f"running    {f'yes, process {owner}' if owner else 'no'}")
        for role in ("service", "redis", "api", "prefill", "decode"):
            if last := logs.tail(config.data_dir / "logs" / f"{role}.log", 1):
                print(f"{role:<10} {last[0][:160]}")
    return 0 if owner else 1


def show_logs(args: argparse.Namespace) -> int:
    """The last lines of one log or of all, then what is appended."""
    config, _ = _configuration(args)
    folder = config.data_dir / "logs"
    paths = sorted(folder.glob("*.log"))
    if args.name:
        paths = [folder / f"{args.name}.log"]
        if not paths[0].exists():
            there = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none yet"
            raise ConfigError(f"there is no log of that name in {folder}: there are {there}")
    if not paths:
        print(f"no logs yet in {folder}", file=sys.stderr)
    for path in paths:
        for line in logs.tail(path, args.lines):
            print(line if args.name else f"{path.stem:<8} {line}")
    if args.follow:
        for path, line in logs.follow(paths):
            print(line if args.name else f"{path.stem:<8} {line}", flush=True)
    return 0


def _configuration(args: argparse.Namespace) -> tuple[Config, Path | None]:
    return config_of(args), find_file(args.config, args.data)


def _ask(command: list[str]) -> str:
    """One line of what a service manager says."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{command[0]} cannot be asked"
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    states = [line for line in lines if line.startswith("state =")]
    return (states or lines or ["no answer"])[0]


def _status(command: list[str]) -> int:
    """The exit status of a command whose words do not matter; 127 where it is not here."""
    try:
        return subprocess.run(
            command, capture_output=True, timeout=COMMAND_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 127


def _run(command: list[str], *, fatal: bool = True) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not here: the file is written, start it by other means")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
        env={**os.environ},
    )  # fmt: skip
    if done.returncode and fatal:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        cure = ""
        # launchd has a place for a user's services only while that user is logged in at the screen.
        if f": {NO_DOMAIN}:" in lines[-1]:
            cure = ". Nobody is logged in at this machine's screen: log in there, or use --system"
        elif NO_BUS in lines[-1]:
            cure = (
                f". The file is written and stays. {getpass.getuser()} has no systemd here: log in "
                "as that user, not by su or sudo, or run `sudo loginctl enable-linger "
                f"{getpass.getuser()}` and set XDG_RUNTIME_DIR=/run/user/{os.getuid()}; then again"
            )
        raise ConfigError(f"{' '.join(command)}: {lines[-1]}{cure}")
