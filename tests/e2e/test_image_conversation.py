"""Images in a conversation: through every process, resumed by ID, equal to one process alone."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_dirs import make_image_model
from PIL import Image
from stack_kit import DEADLINE, Running, short_directory

from engine.device import prepare
from engine.model import Model, load
from engine.names import SEEN
from engine.pictures import Processor, see
from engine.prefill import expand_schedule
from engine.sampling import SamplingParams
from engine.solo import answer
from scheduler.api.tokenizer import Tokenizer
from scheduler.images import data_url, images_of
from scheduler.redis_client import connect

TOKENS = 9


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("images") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Model:
    return load(model_dir, prepare())


@pytest.fixture(scope="module")
def stack(model_dir: Path) -> Iterator[Running]:
    directory = short_directory()
    running = Running(model_dir, directory, api={"max_images": 3, "max_images_mb": 1})
    yield running
    running.close()
    shutil.rmtree(directory, ignore_errors=True)


def picture(seed: int, size: tuple[int, int] = (64, 48)) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return data_url(file.getvalue())


def user(*parts: str) -> list[dict[str, Any]]:
    """A user's message; what is a data URL is an image."""
    content = [
        {"type": "input_image", "image_url": part}
        if part.startswith("data:")
        else {"type": "input_text", "text": part}
        for part in parts
    ]
    return [{"type": "message", "role": "user", "content": content}]


def plain(model: Model) -> dict[int, float]:
    """A bias against special tokens, which a model of random weights says anywhere."""
    return dict.fromkeys(Tokenizer.load(model.path).special_ids, -100.0)


def assert_alone(stack: Running, model: Model, response: str) -> list[int]:
    """The stored turn is what one process says that makes the same forwards; its output ids."""
    turn = stack.until(lambda: stack.store.get_turn(response), f"the turn of {response}")
    ids = stack.store.turn_ids(response)
    prompt = len(ids) - len(turn.output_ids)
    items = [item for each in stack.store.path_of(response) for item in each.items]
    lengths, total, count = expand_schedule(turn.schedule), 0, 0
    while total < prompt - 1:
        total += lengths[count]
        count += 1
    assert total == prompt - 1
    seen = see(model, Processor(model.path), ids[:prompt], images_of(items))
    params = SamplingParams(max_tokens=TOKENS, stop_ids=model.eos_ids, logit_bias=plain(model))
    alone = answer(model, ids[:prompt], lengths[:count], params, embedded=seen)
    assert list(turn.output_ids) == alone.tokens
    return list(ids)


def test_images_are_seen_kept_and_resumed(stack: Running, model: Model) -> None:
    body = {"max_output_tokens": TOKENS, "logit_bias": plain(model)}
    first = stack.post(input=user("What is on ", picture(1), "?"), **body)
    assert first["tandem"]["path"] == "cold"
    assert first["tandem"]["handoff"]["path"] == "tcp"
    ids = assert_alone(stack, model, first["id"])
    assert sum(token >= SEEN for token in ids) == 64 * 48 // 64
    assert first["usage"]["input_tokens"] == len(ids) - first["usage"]["output_tokens"]

    # The files are kept once, with the turn.
    with connect(stack.config.redis_url) as client:
        assert len(client.hget(f"tandem:job:{first['id']}", "request")) < 2000 < len(picture(1))
    listed = stack.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert listed[0]["content"][1]["image_url"] == picture(1)

    stack.saved(first["id"])
    second = stack.post(input="And why?", previous_response_id=first["id"], **body)
    assert second["tandem"]["path"] in ("hot", "restored"), repr(second["tandem"])
    assert second["tandem"]["computed_tokens"] == second["tandem"]["new_tokens"] < 40
    assert_alone(stack, model, second["id"])

    stack.saved(second["id"])
    third = stack.post(
        input=user("Compare", picture(2, (48, 80)), picture(1)),
        previous_response_id=second["id"],
        **body,
    )
    assert third["tandem"]["computed_tokens"] == third["tandem"]["new_tokens"]
    whole = assert_alone(stack, model, third["id"])
    assert whole[: len(ids)] == ids
    assert sum(token >= SEEN for token in whole) == 48 + 60 + 48

    # The same place in the conversation, another image of the same size.
    other = stack.post(input=user("What is on ", picture(3), "?"), **body)
    changed = assert_alone(stack, model, other["id"])
    prompt = first["usage"]["input_tokens"]
    assert [a == b for a, b in zip(ids[:prompt], changed[:prompt], strict=True)] == [
        token < SEEN for token in ids[:prompt]
    ]
    assert other["tandem"]["cached_tokens"] < ids.index(next(t for t in ids if t >= SEEN))


def test_the_other_protocols_take_images(stack: Running, model: Model) -> None:
    shown = picture(5)
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Say what this is: "},
                {"type": "image_url", "image_url": {"url": shown}},
            ],
        }
    ]
    asked = {"messages": chat, "max_tokens": TOKENS, "logit_bias": plain(model)}
    said = stack.http.post("/v1/chat/completions", json=asked).json()
    response = "resp_" + said["id"].rpartition("-")[2]
    ids = assert_alone(stack, model, response)
    chat += [
        {"role": "assistant", "content": said["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Go on."},
    ]
    again = stack.http.post("/v1/chat/completions", json=asked).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids) - 1
    assert_alone(stack, model, "resp_" + again["id"].rpartition("-")[2])

    source = {"type": "base64", "media_type": "image/png", "data": shown.partition(",")[2]}
    content = [{"type": "text", "text": "Look: "}, {"type": "image", "source": source}]
    asked = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
    }
    said = stack.http.post("/v1/messages", json=asked).json()
    counted = stack.http.post("/v1/messages/count_tokens", json=asked).json()
    assert (
        said["usage"]["input_tokens"] + said["usage"]["cache_read_input_tokens"]
        == (counted["input_tokens"])
    )
    assert counted["input_tokens"] > 48


def test_the_command_line_shows_images(stack: Running, model: Model, tmp_path: Path) -> None:
    file = tmp_path / "shown.png"
    file.write_bytes(images_of(user(picture(7)))[0])
    words = ["submit", "-", "--json", "--image", str(file), "--max-tokens", str(TOKENS)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler.cli", *words, "--url", stack.config.api_url],
        input="What is this?", capture_output=True, text=True, timeout=DEADLINE, check=True,
    )  # fmt: skip
    response = json.loads(done.stdout)
    asked = stack.http.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    assert asked[0]["content"][0]["image_url"] == picture(7)
    ids = stack.store.turn_ids(response["id"])
    assert sum(token >= SEEN for token in ids) == 48


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([picture(1)] * 4, "at most 3"),
        (["data:image/png;base64,AAAA"], "cannot be read"),
        (["data:image/png;base64,?"], "no valid base64"),
        (["data:text/plain,x"], "data:image/"),
        (["data:image/png;base64," + "A" * 1_400_000], "larger than 1 MB"),
    ],
)
def test_bad_images_are_refused(stack: Running, parts: list[str], message: str) -> None:
    answer = stack.http.post("/v1/responses", json={"input": user("Look", *parts)})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_urls_are_not_fetched_unasked(stack: Running) -> None:
    content = [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]
    items = [{"type": "message", "role": "user", "content": content}]
    answer = stack.http.post("/v1/responses", json={"input": items})
    assert answer.status_code == 400
    assert "api.fetch_images" in answer.json()["error"]["message"]
    items[0]["role"] = "assistant"
    answer = stack.http.post("/v1/responses", json={"input": items})
    assert answer.json()["error"]["code"] == "unsupported_content"
