"""Batches and owners with every process real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from openai import OpenAI
from stack_kit import QUICK, Running, running, solo

from scheduler import owners

TEXT = files("scheduler").joinpath("data/alice.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    yield from running(model_dir, jobs=QUICK)


@pytest.mark.rotate(5)
def test_a_batch_outlives_every_process(stack: Running) -> None:
    client = OpenAI(base_url=f"{stack.config.api_url}/v1", api_key="none", max_retries=4)
    lines = [
        {
            "custom_id": f"q{n}",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"input": f"Say {n}.", "max_output_tokens": 4, "temperature": 0},
        }
        for n in range(8)
    ]
    data = "\n".join(json.dumps(line) for line in lines) + "\n{broken"
    file = client.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    for name in ("api", "redis", "decode", "prefill"):
        old = stack.kill(name)
        stack.wait_back(name, old)

    def ended() -> bool:
        return client.batches.retrieve(batch.id).status == "completed"

    stack.until(ended, "the end of the batch")
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 9, "completed": 8, "failed": 1}
    assert batch.output_file_id is not None
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    names = [row["response"]["body"]["id"] for row in rows]
    runs = []
    for name in names:
        ids, schedule, limit = stack.recorded(name)
        runs.append({"ids": ids, "schedule": schedule, "params": {"max_tokens": limit}})
    alone = [run["tokens"] for run in solo(stack.config, runs)]
    assert [stack.output_ids(name) for name in names] == alone


@pytest.mark.rotate(5)
def test_nobody_gains_by_what_another_has_stored(stack: Running) -> None:
    prompt = f"{TEXT[:3000]}\n\nWho is this about?"

    def ask(token: str) -> tuple[str, dict[str, object]]:
        client = OpenAI(base_url=f"{stack.config.api_url}/v1", api_key=token, max_retries=4)
        made = client.responses.create(
            model="default", input=prompt, max_output_tokens=4, temperature=0
        )
        facts: dict[str, object] = made.to_dict()["tandem"]  # type: ignore[assignment]  # our field
        return made.id, facts

    data = stack.config.data_dir
    alice, bob = owners.add(data, "alice"), owners.add(data, "bob")
    try:
        name, first = ask(alice)
        assert first["cached_tokens"] == 0
        stack.saved(name)  # from now on another turn of the same owner begins with it
        _, second = ask(alice)
        _, theirs = ask(bob)
    finally:
        owners.remove(data, "alice")
        owners.remove(data, "bob")
    assert isinstance(second["cached_tokens"], int)
    assert second["cached_tokens"] > 0
    assert theirs["cached_tokens"] == 0
    assert theirs["path"] == first["path"] == "cold"
    assert theirs["computed_tokens"] == first["computed_tokens"]
