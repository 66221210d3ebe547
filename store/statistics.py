"""What `tandem store stats` says: counts and sizes, how full the map is, what has happened."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from store.codec.scatter import VARIANT
from store.objects import ROOT
from store.quotas import stored_bytes
from store.resident import resident_of
from store.states import INSIDE, PREAMBLE

if TYPE_CHECKING:
    from store.store import Store

MOST_RECENT = 1000


def statistics(store: Store) -> dict[str, Any]:
    """Counts and sizes: what is stored, how full the map is, what happened since the start."""
    environment = store.environment
    with environment.read() as txn:
        objects, values, nbytes = store.blocks.totals(txn)
        live = environment.live_pages(txn)
        conversations = txn.stat(environment.order)["entries"] // 2
        states = txn.stat(environment.state)["entries"]
        turns = txn.stat(environment.turn)["entries"]
        pending = txn.stat(environment.pend)["entries"]
        days = store.wear.days(txn)
        preambles = sum(1 for _ in store.states.named(txn, PREAMBLE))
        inside = [store.blocks.get(txn, one.snap) for one in store.states.named(txn, INSIDE)]
    page = environment.page_size
    info = environment.env.info()
    return {
        "path": str(environment.path),
        "conversations": int(conversations),
        "turns": int(turns),
        "states": int(states),
        "objects": objects,
        "values": values,
        "payload_bytes": nbytes,
        "live_bytes": live * page,
        "file_bytes": (int(info["last_pgno"]) + 1) * page,
        "map_bytes": environment.map_pages * page,
        "live_share": live / environment.map_pages,
        "pending": int(pending),
        "evicted_of_other_models": store.evictor.foreign,
        "in_use": len(store.pins),
        "prefix_hits": store.reading.prefix_hits,
        "preambles": preambles,
        "inside_prompts": len(inside),
        "inside_prompts_bytes": sum(stored_bytes(one) for one in inside if one is not None),
        "inside_prompts_hits": store.reading.inside_hits,
        "written_today_bytes": days.get(time.strftime("%Y-%m-%d", time.gmtime()), 0),
        "written_month_bytes": sum(days.values()),
        "over_daily_budget": store.wear.refused,
        "evicted": store.evictor.evicted,
        "recovered": store.recovered,
        "damaged": len(store.damaged),
        "page_size": page,
        "copies": VARIANT,
    }


def residency(store: Store, limit: int = 20) -> list[dict[str, Any]]:
    """How much of each of the latest states lies in memory, the last used first.

    Keys: conversation (empty for a shared preamble), turn, used (seconds), bytes of its bulk values
    and resident_bytes of them, asked of the kernel. Blocks that states share count for each.
    """
    result = []
    fd = store.environment.data_fd
    with store.environment.read() as txn:
        names = list(islice(store.states.latest_first(txn), max(0, min(limit, MOST_RECENT))))
        for name in names:
            state = store.states.get(txn, name)
            if state is None:
                continue
            spans = list(store.blocks.spans(txn, state.snap))
            ident = state.head
            while ident != ROOT and (record := store.blocks.get(txn, ident)) is not None:
                spans += store.blocks.spans(txn, ident)
                ident = record.parent
            result.append(
                {
                    "conversation": state.conversation,
                    "turn": state.turn,
                    "used": state.used,
                    "bytes": sum(length for _, length in spans),
                    "resident_bytes": resident_of(fd, spans),
                }
            )
    return result
