"""What this end is made of, told in Hello and compared there."""

from __future__ import annotations

import logging
import platform
from importlib import metadata

from store.codec.header import FORMAT
from transport.errors import LinkError
from transport.protocol import PROTOCOL, Hello

log = logging.getLogger("tandem.transport")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def system() -> str:
    """Operating system and its version; on macOS the product version, which RDMA depends on."""
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}"


def hello(node: str, boot: str = "") -> Hello:
    """This process's Hello, without importing mlx; `boot` as in epochs."""
    return Hello(
        node=node,
        protocol=PROTOCOL,
        codec=FORMAT,
        tandem=_version("tandem-serve"),
        mlx=_version("mlx"),
        system=system(),
        boot=boot,
    )


def about() -> dict[str, str]:
    """What this machine runs, for `tandem doctor` to compare with the other; without mlx."""
    return {
        "protocol": str(PROTOCOL),
        "codec": str(FORMAT),
        "tandem": _version("tandem-serve"),
        "mlx": _version("mlx"),
        "mlx_vlm": _version("mlx-vlm"),
        "system": system(),
    }


def compare(mine: Hello, theirs: Hello) -> None:
    """Raise LinkError, naming both versions, if a difference breaks the wire."""
    for what, name in (("protocol", "link protocol"), ("codec", "state format")):
        a, b = getattr(mine, what), getattr(theirs, what)
        if a != b:
            raise LinkError(
                f"{name} {a} here (Tandem {mine.tandem}), {b} on {theirs.node} "
                f"(Tandem {theirs.tandem}); install the same Tandem on both",
                "version",
            )
    if mine.tandem != theirs.tandem or mine.mlx != theirs.mlx:
        log.warning(
            "%s runs Tandem %s with mlx %s, this machine %s with %s: update both",
            theirs.node, theirs.tandem, theirs.mlx, mine.tandem, mine.mlx,
        )  # fmt: skip


def compare_rdma(mine: Hello, theirs: Hello) -> None:
    """Raise LinkError, naming both versions, where two groups would cut bytes differently.

    How an operation is striped over cables changes with mlx builds, and the size of RDMA frames
    with macOS builds; neither is checked by the groups themselves.
    """
    for what, name in (("mlx", "mlx"), ("system", "operating system")):
        a, b = getattr(mine, what), getattr(theirs, what)
        if a != b:
            raise LinkError(
                f"rdma needs the same {name} on both ends: {a} here, {b} on {theirs.node}",
                "version",
            )
