"""Summaries of conversations as the opaque text that a `compaction` item carries.

The text is base64, no secret: nothing is kept here, so what comes back is the client's word, as
every other item is.
"""

from __future__ import annotations

import base64
import binascii
import zlib

MAX_SUMMARY = 1 << 20
"""Bytes of a summary."""


def seal(summary: str) -> str:
    """A summary as the opaque text of a compaction item."""
    return base64.urlsafe_b64encode(zlib.compress(summary.encode("utf-8", "replace"))).decode()


def unseal(text: str) -> str:
    """The inverse of `seal`. Raises ValueError for anything else, or beyond the size limit."""
    try:
        opened = zlib.decompressobj()
        data = opened.decompress(base64.urlsafe_b64decode(text.encode()), MAX_SUMMARY)
        if not opened.eof:
            raise ValueError("too long")
        return data.decode()
    except (binascii.Error, zlib.error, UnicodeError, ValueError) as error:
        raise ValueError("encrypted_content is not what this server made") from error
