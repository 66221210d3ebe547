"""Two hosts on one machine: network namespaces of their own, joined by a cable that can be cut.

Needs Linux, root and iproute2. A second cable joins the first host to this machine, so that
clients outside reach its API. Elsewhere both hosts share this machine's network, and nothing can
be cut: `cables` is false.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

COMMAND_SECONDS = 300.0


class HostsFailed(Exception):
    """A host could not be made, or one of its commands failed; the message quotes it."""


class Host:
    """One of the two machines: its own network, data directory and configuration."""

    def __init__(self, name: str, address: str, directory: Path, namespace: str) -> None:
        self.name = name
        self.address = address
        self.directory = directory
        self.data = directory / "data"
        self.runtime = directory / "run"
        self.runtime.mkdir(mode=0o700, parents=True)
        self.namespace = namespace
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("TANDEM_") and key != "REDIS_URL"
        }
        self.environment |= {
            "TANDEM_DATA": str(self.data),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command as it runs on this host."""
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*prefix, *command]

    def tandem(self, *words: str, check: bool = True, text: str | None = None) -> str:
        """Run `tandem WORDS` here; returns its standard output. Raises HostsFailed."""
        done = subprocess.run(
            self.inside([sys.executable, "-P", "-m", "scheduler.cli", *words]),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.directory,
            input=text,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if check and done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise HostsFailed(f"{self.name}: tandem {' '.join(words)}: {last[0]}")
        return done.stdout

    def up(self) -> None:
        """Start `tandem up`, as the machine's service does at boot."""
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.inside([sys.executable, "-P", "-m", "scheduler.cli", "up"]),
                env=self.environment,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def down(self, seconds: float = 120.0) -> None:
        """Stop it as a service manager does. Raises HostsFailed when it does not end in time."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.crash()
            raise HostsFailed(f"{self.name} did not stop within {seconds:.0f} s") from None
        self.process = None

    def crash(self) -> None:
        """Power off: every process of this host dies at once."""
        end = time.monotonic() + 20
        while found := self.pids():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.poll()
            if time.monotonic() > end:
                raise HostsFailed(f"processes of {self.name} do not die: {found}")
            time.sleep(0.05)
        if self.process is not None:
            self.process.wait()
            self.process = None

    def pids(self) -> list[int]:
        """Living processes of this host, found by their network or by what they name.

        (Redis writes its title over its environment; its command line names its socket.)
        """
        mark = os.fsencode(self.directory)
        space = os.stat(f"/run/netns/{self.namespace}").st_ino if self.namespace else -1
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if (
                        os.stat(entry / "ns" / "net").st_ino == space
                        or mark in (entry / "environ").read_bytes()
                        or mark in (entry / "cmdline").read_bytes()
                    ) and (entry / "cmdline").read_bytes():  # a zombie has none
                        found.append(int(entry.name))
        return found

    def service(self, word: str) -> int | None:
        """Process id of the worker, API or server whose command line has `word`."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    return pid
        return None

    def logs(self, lines: int = 12) -> str:
        """The last lines of every log, for a failure's report."""
        found = []
        for path in [self.directory / "up.log", *sorted((self.data / "logs").glob("*.log"))]:
            with contextlib.suppress(OSError):
                tail = path.read_text(errors="replace").splitlines()[-lines:]
                found.append(f"--- {self.name} {path.name}\n" + "\n".join(tail))
        return "\n".join(found)


class TwoHosts:
    """`decode` and `prefill`, joined by a cable. A context manager that leaves nothing behind."""

    def __init__(self, directory: Path) -> None:
        """Raises HostsFailed where namespaces cannot be made although the rights seem to be there.

        `directory` must have a short path: sockets lie in it.
        """
        self.directory = directory
        self.cables = namespaces_work()
        tag = secrets.token_hex(3)
        net = 16 + secrets.randbelow(200)
        self._spaces = [f"tdm{tag}a", f"tdm{tag}b"] if self.cables else ["", ""]
        self._made: list[str] = []
        self.outside = f"10.{net}.9.1" if self.cables else "127.0.0.1"
        addresses = [f"10.{net}.7.{i}" if self.cables else "127.0.0.1" for i in (1, 2)]
        try:
            if self.cables:
                self._lay(tag, addresses, net)
        except (subprocess.CalledProcessError, OSError) as error:
            self.close()
            text = getattr(error, "stderr", b"") or b""
            raise HostsFailed(
                f"network namespaces cannot be made: {text.decode().strip() or error}"
            ) from None
        self.decode = Host("decode", addresses[0], directory / "m1", self._spaces[0])
        self.prefill = Host("prefill", addresses[1], directory / "m2", self._spaces[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in (self.decode, self.prefill):
            with contextlib.suppress(HostsFailed):
                host.crash()
        self.close()

    def close(self) -> None:
        """Remove the namespaces and with them the cables."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True)

    def cut(self) -> None:
        """Pull the cable between the two: their addresses on it stay."""
        _run("ip", "-n", self._spaces[1], "link", "set", "cable", "down")

    def mend(self) -> None:
        """Plug it in again."""
        _run("ip", "-n", self._spaces[1], "link", "set", "cable", "up")

    def _lay(self, tag: str, addresses: list[str], net: int) -> None:
        a, b = self._spaces
        for space in (a, b):
            _run("ip", "netns", "add", space)
            self._made.append(space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable",
             "netns", b)  # fmt: skip
        for space, address in zip((a, b), addresses, strict=True):
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "cable")
            _run("ip", "-n", space, "link", "set", "cable", "up")
        lan = f"tdm{tag}l"
        _run("ip", "link", "add", lan, "type", "veth", "peer", "name", "lan", "netns", a)
        _run("ip", "addr", "add", f"10.{net}.9.2/24", "dev", lan)
        _run("ip", "link", "set", lan, "up")
        _run("ip", "-n", a, "addr", "add", f"{self.outside}/24", "dev", "lan")
        _run("ip", "-n", a, "link", "set", "lan", "up")


def namespaces_work() -> bool:
    """Whether this process may make network namespaces."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


def set_up(hosts: TwoHosts, model: Path, **more: Any) -> str:
    """Run `tandem init` on both, as the guide says, and append the sections `more`.

    Returns the API's token.
    """
    made = json.loads(
        hosts.decode.tandem(
            "init", "--role", "decode", "--link", hosts.decode.address, "--model", str(model),
            "--api", hosts.outside, "--json",
        )
    )  # fmt: skip
    hosts.prefill.tandem(
        "init", "--role", "prefill", "--link", hosts.prefill.address, "--model", str(model),
        "--join", made["join"], "--json",
    )  # fmt: skip
    for host in (hosts.decode, hosts.prefill):
        _amend(host.data / "tandem.toml", more)
    token = tomllib.loads((hosts.decode.data / "tandem.toml").read_text())["api"]["token"]
    return str(token)


def _amend(path: Path, more: dict[str, dict[str, Any]]) -> None:
    """Set keys of sections in a file that `tandem init` wrote."""
    lines = path.read_text().splitlines()
    for section, values in more.items():
        head = f"[{section}]"
        if head not in lines:
            lines += ["", head]
        at = lines.index(head) + 1
        for key, value in values.items():
            lines = [line for line in lines if not line.startswith(f"{key} = ")]
            lines.insert(at, f"{key} = {json.dumps(value)}")
    path.write_text("\n".join(lines) + "\n")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
