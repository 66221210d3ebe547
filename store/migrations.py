"""From an older format of the store to the present one, in one transaction.

A step takes the open environment and the transaction, and turns format n into n + 1; it is found
under n. All steps, and the new format number, are committed together: a crash or an error in
between leaves the store as it was, for the program that made it or for another attempt. A format
is never taken back: that is what a copy made before the update is for.

What a step must not do: rewrite bulk values (a migration that is larger than the free part of the
map fails as a whole) or guess.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from store.errors import StoreError

log = logging.getLogger(__name__)

Step = Callable[[Any, Any], None]
_STATES = (b"blk", b"dat", b"index", b"lru", b"pend", b"state")


def _drop_states(env: Any, txn: Any) -> None:
    """1 to 2: a block's id covers its owner since, which format 1 does not tell of a shared block.

    Conversations, messages and token ids stay; cache states go, and are computed again when their
    conversations go on.
    """
    for name in _STATES:
        txn.drop(env.open_db(name, txn=txn), delete=False)
    _delete(txn, env.open_db(b"pages", txn=txn), (b"h", b"p", b"s"))
    _delete(txn, env.open_db(b"meta", txn=txn), (b"schema/", b"totals"))


def _delete(txn: Any, table: Any, beginnings: tuple[bytes, ...]) -> None:
    """Delete the keys that begin so."""
    for beginning in beginnings:
        cursor = txn.cursor(db=table)
        found = cursor.set_range(beginning)
        while found and bytes(cursor.key()).startswith(beginning):
            found = cursor.delete()


MIGRATIONS: dict[int, Step] = {1: _drop_states}


def migrate(env: Any, txn: Any, found: int, wanted: int, steps: Mapping[int, Step]) -> None:
    """Bring a store of format `found` to `wanted`. Raises StoreError where that is not possible.

    The caller commits, and must roll back when this raises.
    """
    if found > wanted:
        raise StoreError(
            f"the store has format {found} and this program knows {wanted}: it was used by a newer "
            "Tandem; update this one, or put the copy back that was made before the update"
        )
    missing = [number for number in range(found, wanted) if number not in steps]
    if missing:
        raise StoreError(
            f"the store has format {found} and this program, which knows {wanted}, cannot migrate "
            f"format {missing[0]}: export its conversations with the program that made it and "
            "import them here"
        )
    for number in range(found, wanted):
        log.info("migrating the store from format %d to %d", number, number + 1)
        try:
            steps[number](env, txn)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(
                f"the store could not be migrated from format {number} ({error!r}); it is as it "
                "was: go back to the program that made it, and report this"
            ) from error
