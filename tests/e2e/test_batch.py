"""A batch with every process real, each of them killed on the way."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI
from stack_kit import Running, solo


@pytest.mark.rotate(4)
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
