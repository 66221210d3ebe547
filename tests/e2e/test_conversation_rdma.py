"""The same conversation with the bulk data going through mx.distributed's child processes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from stack_kit import Running, running

TEXT = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> object:
    yield from running(model_dir, link={"backend": "rdma", "deadline_seconds": 60.0})


@pytest.mark.rotate(5)
def test_state_crosses_by_rdma_and_survives_the_death_of_either_worker(stack: Running) -> None:
    def ask() -> None:
        done = stack.post(
            input=f"{TEXT[:1200]}\n\nWho ran by?",
            max_output_tokens=6,
            metadata={"tandem_prefix": "off"},
        )
        assert done["tandem"]["path"] == "cold"
        assert done["tandem"]["handoff"]["path"] == "rdma"
        assert stack.output_ids(done["id"]) == stack.solo(done["id"])
        more = stack.post(
            input=f"{TEXT[1200:1800]}\n\nAnd then?",
            previous_response_id=done["id"],
            max_output_tokens=6,
            metadata={"tandem_extend": "prefill"},
        )
        assert more["tandem"]["path"] == "extended"
        assert more["tandem"]["handoff"]["borrowed"]["path"] == "rdma"
        assert stack.output_ids(more["id"]) == stack.solo(more["id"])

    ask()
    for worker in ("decode", "prefill"):
        old = stack.kill(worker)
        stack.wait_back(worker, old)
        ask()
