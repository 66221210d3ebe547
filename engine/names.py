"""Token ids that name the parts of images.

A model sees one and the same token at every place of every image. In Tandem's token ids such a
place has an id beyond every vocabulary, drawn from the image's digest, so that ids are equal only
where the images are: whatever is found, shared, hashed or compared by token ids tells images apart.
"""

from __future__ import annotations

import hashlib
import struct

SEEN = 1 << 31  # ids from here on are an image's


def names(data: bytes, count: int) -> list[int]:
    """The ids of the `count` tokens of an image file; fewer are the first of more."""
    digest = hashlib.blake2b(data, digest_size=32, person=b"tandem image").digest()
    stream = hashlib.shake_256(digest).digest(4 * count)
    return [value | SEEN for value in struct.unpack(f"<{count}I", stream)]
