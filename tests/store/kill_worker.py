"""Works on a store until it is killed, saying what it is about to do and what was acknowledged.

Lines: `turn ID CONVERSATION PARENT N`, `state ID TOKENS`, `gone CONVERSATION`, each first with a
leading `?` (begun) and then without (acknowledged); `?drop ID` when a state is about to go.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from made_states import MODEL, conversation_id, make_state, make_turn, turn_id

from store.store import Store

SIZE = 48 << 20


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def ids_of(turn: str, count: int) -> list[int]:
    """The own token ids of a turn follow from its id."""
    return [int.from_bytes(turn[5:13].encode(), "big") % 50_000 + number for number in range(count)]


def main(path: str, seed: str) -> None:
    chance = random.Random(seed)
    began = time.monotonic()
    store = Store.open(Path(path), SIZE)
    say(f"ready {time.monotonic() - began:.3f} {store.recovered}")
    drop = store.states.drop

    def told(txn: Any, turn: str) -> int:
        if store.states.get(txn, turn) is not None:  # a save drops what it replaces, if anything
            say(f"?drop {turn}")
        return drop(txn, turn)

    store.states.drop = told  # type: ignore[method-assign]
    conversations = [one["id"] for one in store.list_conversations(limit=1000)]
    while True:
        if conversations and chance.random() < 0.15:
            gone = conversations.pop(chance.randrange(len(conversations)))
            say(f"?gone {gone}")
            store.delete_conversation(gone)
            say(f"gone {gone}")
            continue
        parent = None
        if conversations and chance.random() < 0.6:
            conversation = chance.choice(conversations)
            turns = store.conversation_turns(conversation)
            parent = chance.choice(turns[-3:]) if turns else None
        else:
            conversation = conversation_id()
            conversations.append(conversation)
        turn = turn_id()
        count = chance.randint(2, 70)
        own = ids_of(turn, count)
        say(f"?turn {turn} {conversation} {parent} {count}")
        store.put_turn(
            make_turn(own[:-1], own[-1:], conversation=conversation, parent=parent, ident=turn)
        )
        say(f"turn {turn} {conversation} {parent} {count}")
        if chance.random() < 0.8:
            ids = store.turn_ids(turn)[:-1]
            start = 0
            if parent and (ref := store.find_state(parent)):
                start = ref.tokens // 16 * 16
                reader = store.load_state(parent, MODEL)
                assert reader is not None
                assert list(reader)
                assert reader.report.complete, reader.report
            if len(ids) > 400:
                continue
            size = chance.choice([100, 70_000, 1_500_000])
            state = make_state(ids, start=start, row_bytes=7000, snapshot_bytes=size)
            say(f"?state {turn} {len(ids)}")
            store.save_state(turn, *state)
            say(f"state {turn} {len(ids)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
