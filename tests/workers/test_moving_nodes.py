"""`tandem node`: conversations brought from node to node from the command line."""

from __future__ import annotations

import pytest
from decode_kit import asking, make_job
from moving_kit import Pair
from redis_kit import eventually
from test_late_engine import ids

from scheduler.cli import main


def test_a_node_is_drained_from_the_command_line(
    pair: Pair, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.rpc[0].add("move_conversation", pair.mover.move)
    told_new: list[bool] = []
    pair.rpc[0].add("take_new", lambda yes: told_new.append(yes))
    idents = [f"conv_{k:032x}" for k in range(3)]
    for ident in idents:
        job = make_job(ids(), request=asking(2), conversation=ident)
        pair.leaving.answer(job)
    pair.leaving.settle()
    busy = idents[1]
    pair.client.sadd(f"tandem:at:{busy}", "resp_1")
    pair.client.hset("tandem:job:resp_1", "status", "decoding")
    config = pair.dir / "tandem.toml"
    config.write_text(f'data_dir = "{pair.dir}/d"\n[redis]\nurl = "{redis_url}"\n')

    def tandem(*words: str) -> tuple[int, str]:
        status = main(["node", *words, "--config", str(config)])
        told = capsys.readouterr()
        return status, told.out + told.err

    status, told = tandem("drain", "m3")
    assert status == 1
    assert f"{busy} stays: {busy} is busy" in told
    assert "2 conversations moved, 1 stayed" in told
    assert {one["id"] for one in pair.other.store.list_conversations()} >= {idents[0], idents[2]}
    assert [one["id"] for one in pair.leaving.store.list_conversations()] == [busy]
    pair.client.delete(f"tandem:at:{busy}")
    status, told = tandem("move", busy, "--to", "m4")
    assert status == 0
    assert f"{busy}: m3 -> m4, 1 turns, 1 states" in told
    assert tandem("move", "conv_x", "--to", "m4")[0] != 0
    assert tandem("drain", "m3") == (0, "0 conversations moved, 0 stayed\n")
    assert told_new == [False, False]
    assert tandem("drain", "m3", "--undo") == (0, "m3 takes new ones\n")
    assert told_new[-1] is True
    pair.presence[1].update(state="draining")
    eventually(lambda: pair.mover._nodes.get("decode", "m4").state == "draining", "")  # type: ignore[union-attr]  # it lives
    status, told = tandem("drain", "m3")
    assert status != 0
    assert "no other decode node" in told
    assert len(told_new) == 3
