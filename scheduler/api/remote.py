"""Fetching images that a request names by URL: from public addresses only, and bounded.

A name is resolved once, all its addresses must be public, and the connection goes to one of those
addresses, so that no second answer of the name server can lead elsewhere. Redirects are followed by
the same rules.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from urllib.parse import urljoin, urlsplit

import httpx

from scheduler.images import ImageError, data_url

REDIRECTS = 3
SECONDS = 20.0
Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address is one of the public Internet: no loopback, private, link-local or other
    special range, nor such an IPv4 address inside an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if parsed in ipaddress.ip_network("64:ff9b::/96") or parsed.teredo is not None:
            return False
    return parsed.is_global and not parsed.is_multicast


def fetch(
    url: str,
    limit: int,
    *,
    addresses: Resolve = resolve,
    public: Callable[[str], bool] = is_public,
    transport: httpx.BaseTransport | None = None,
) -> str:
    """The image at `url` as a data URL, of at most `limit` bytes. Raises ImageError."""
    deadline = time.monotonic() + SECONDS
    with httpx.Client(
        timeout=SECONDS, follow_redirects=False, trust_env=False, transport=transport
    ) as client:
        for _ in range(REDIRECTS + 1):
            target, host = _target(url, addresses, public)
            try:
                with client.stream(
                    "GET", target, headers={"Host": host}, extensions={"sni_hostname": _name(host)}
                ) as answer:
                    if answer.is_redirect:
                        url = urljoin(url, answer.headers.get("location", ""))
                        continue
                    return _read(answer, limit, deadline)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                kind = type(error).__name__
                raise ImageError(f"the image cannot be fetched ({kind}): send its data") from None
    raise ImageError(f"the image's address redirects more than {REDIRECTS} times: send its data")


def _read(answer: httpx.Response, limit: int, deadline: float) -> str:
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if answer.status_code != 200:
        raise ImageError(f"the image's server answers {answer.status_code}: send its data")
    if not kind.startswith("image/"):
        raise ImageError("there is no image at the image's address: send its data")
    data = bytearray()
    for chunk in answer.iter_bytes(1 << 16):
        data += chunk
        if len(data) > limit:
            raise ImageError(f"the image is larger than {limit} bytes: send a smaller one")
        if time.monotonic() > deadline:
            raise ImageError(f"the image took longer than {SECONDS:.0f} s: send its data")
    return data_url(bytes(data), kind)


def _target(url: str, addresses: Resolve, public: Callable[[str], bool]) -> tuple[str, str]:
    """The URL with a checked address in the host's place, and what the Host header says."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ImageError("the image's address is no URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ImageError("an image's address begins with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise ImageError("an image's address must not hold a password")
    try:
        found = list(addresses(parts.hostname, port))
    except (OSError, UnicodeError):
        raise ImageError("the image's server has no known address: send its data") from None
    if not found or not all(public(address) for address in found):
        raise ImageError("images are fetched from public addresses only: send its data")
    address = f"[{found[0]}]" if ":" in found[0] else found[0]
    rest = parts._replace(netloc=f"{address}:{port}", fragment="").geturl()
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return rest, name if parts.port is None else f"{name}:{port}"


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
