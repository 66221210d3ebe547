"""Images in items: as data URLs, which are stored with the turn."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_HEAD = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class ImageError(Exception):
    """An image cannot be had; the message names cause and cure."""


def data_url(data: bytes, kind: str = "image/png") -> str:
    """An image file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bytes_of(url: str) -> bytes:
    """The file in a data URL. Raises ImageError."""
    head = _HEAD.match(url)
    if head is None:
        raise ImageError("an image is given as data:image/...;base64,...")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image is no valid base64 ({error})") from None
    if not data:
        raise ImageError("an image is empty")
    return data


def parts_of(items: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The image parts of messages, in order."""
    for item in items:
        content = item.get("content")
        if item.get("type", "message") == "message" and isinstance(content, list):
            yield from (part for part in content if part.get("type") == "input_image")


def without_data(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """An ended job's request without the image files, which its turn has; None without any."""
    items = request.get("input") or ()
    if not any(parts_of(items)):
        return None
    bare = [
        {**item, "content": [_bare(part) for part in item["content"]]}
        if any(parts_of([item]))
        else item
        for item in items
    ]
    return {**request, "input": bare}


def is_bare(items: Iterable[Mapping[str, Any]]) -> bool:
    """Whether image files were taken out of these items."""
    return any(part.get("image_url") is None for part in parts_of(items))


def _bare(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, "image_url": None} if part.get("type") == "input_image" else dict(part)


def images_of(items: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """The image files of stored items, in order. Raises ImageError."""
    return [bytes_of(str(part.get("image_url"))) for part in parts_of(items)]
