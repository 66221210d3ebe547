"""Damage as a disk does it: bytes of a stored value change where they lie, behind LMDB's back."""

from __future__ import annotations

from store.parts import HEAD, PAGE_HEAD
from store.store import Store


def flip(store: Store, ident: bytes, number: int, at: int) -> None:
    """Change one byte of the payload of a block's bulk value; done twice, it is as before."""
    environment = store.environment
    with environment.read() as txn:
        record = store.blocks.get(txn, ident)
        assert record is not None
        page = store.blocks.values.page(txn, ident, record, number)
    offset = page * environment.page_size + PAGE_HEAD + HEAD.size + at
    with (environment.path / "data.mdb").open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
