"""How much of the store each owner may have."""

from __future__ import annotations

from pathlib import Path

from scheduler import owners
from worker_decode.process import shares


def test_an_owners_own_limit_and_that_of_everybody(tmp_path: Path) -> None:
    owners.add(tmp_path, "alice", stored_gb=2)
    owners.add(tmp_path, "bob")
    known = owners.Owners(tmp_path)
    without = shares(known, 0)
    assert [without(name) for name in ("@alice", "@bob", "alice", "")] == [2_000_000_000, 0, 0, 0]
    least = shares(known, 1_000_000_000)
    assert [least(name) for name in ("@alice", "@bob", "")] == [1_000_000_000] * 3
    owners.add(tmp_path, "alice", stored_gb=0.5)  # heeded without a restart
    assert least("@alice") == 500_000_000
