"""What `tandem store stats` says: counts and sizes, how full the map is, what has happened."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.store import Store


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
        "pinned": len(store.pins),
        "prefix_hits": store.reading.prefix_hits,
        "written_today_bytes": days.get(time.strftime("%Y-%m-%d", time.gmtime()), 0),
        "written_month_bytes": sum(days.values()),
        "over_daily_budget": store.wear.refused,
        "evicted": store.evictor.evicted,
        "recovered": store.recovered,
        "damaged": len(store.damaged),
        "page_size": page,
    }
