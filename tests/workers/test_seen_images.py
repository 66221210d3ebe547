"""A decode node that has to compute a prompt with images itself, from the stored turns."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_kit import Node, make_job
from model_dirs import make_image_model
from PIL import Image

from engine.device import prepare
from engine.errors import ModelError
from engine.expander import serve
from engine.model import Model, load
from engine.names import SEEN, names
from engine.pictures import Processor, open_image, see
from engine.prefill import Prefill
from engine.rows import Row
from engine.sampling import SamplingParams
from engine.solo import answer
from engine.text import load_tokenizer
from scheduler.api.expander import Expander
from scheduler.api.tokenizer import Tokenizer
from scheduler.images import ImageError, data_url
from scheduler.record import Job, JobError
from worker_decode.pictures import Pictures


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make_image_model(tmp_path_factory.mktemp("seen") / "tiny"), prepare())


@pytest.fixture(scope="module")
def processor(seeing: Model) -> Processor:
    return Processor(seeing.path)


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (64, 48)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def prompt(processor: Processor, *images: bytes) -> list[int]:
    """Text and images in turn; the vision marks around each image are those of the tokenizer."""
    ids = list(range(30, 50))
    before = processor.image_token - 2
    for image in images:
        ids += [before, *processor.ids(image), before + 1, *range(60, 75)]
    return ids


def asked(ids: list[int], *images: bytes, **more: Any) -> Job:
    content = [{"type": "input_image", "image_url": data_url(image)} for image in images]
    items = [{"type": "message", "role": "user", "content": content}]
    params = {"max_output_tokens": 7, "logit_bias": dict.fromkeys(range(420, 435), -100)}
    return make_job(ids, request={"input": items, "params": params}, **more)


def alone(model: Model, processor: Processor, job: Job, *images: bytes) -> list[int]:
    bias = dict.fromkeys(range(420, 435), -100.0)
    seen = see(model, processor, job.prompt_ids, images)
    params = SamplingParams(max_tokens=7, logit_bias=bias)
    return answer(model, job.prompt_ids, (), params, embedded=seen).tokens


def test_a_lost_state_is_computed_from_the_turns_own_images(
    seeing: Model, processor: Processor, tmp_path: Path
) -> None:
    node = Node(seeing, load_tokenizer(seeing.path), tmp_path)
    one, two = picture(1), picture(2)
    first = asked(prompt(processor, one), one)
    node.answer(first)
    assert node.said(first) == alone(seeing, processor, first, one)
    past = node.store.turn_ids(first.id)
    more = asked([*past, *prompt(processor, two, one)], two, one, previous=first.id)
    node.engine.kept.hot.take(first.id)
    finished = node.answer(more)
    assert finished.result is not None
    assert finished.result.path["path"] == "recomputed"
    held = len(first.prompt_ids) - 1
    lengths = [held, *[1] * (len(past) - held - 1)]
    lengths.append(len(more.prompt_ids) - 1 - sum(lengths))
    seen = see(seeing, processor, more.prompt_ids, [one, two])
    bias = dict.fromkeys(range(420, 435), -100.0)
    params = SamplingParams(max_tokens=7, logit_bias=bias)
    assert node.said(more) == answer(seeing, more.prompt_ids, lengths, params, embedded=seen).tokens
    with pytest.raises(JobError, match="not here"):
        node.run(node.execution(asked(prompt(processor, two), one)))
    node.settle()  # what is stored continues as well
    again = asked([*node.store.turn_ids(more.id), *range(50, 60)], previous=more.id)
    finished = node.answer(again)
    assert finished.result is not None
    assert finished.result.path["path"] == "restored"
    node.close()


def test_a_prefill_that_was_interrupted_sees_the_rest(seeing: Model, processor: Processor) -> None:
    one, two = picture(3), picture(4, size=(32, 40))
    ids = prompt(processor, one, two)
    job = asked(ids, one, two)
    whole = Prefill(seeing, ids, lengths=[25, 60, len(ids) - 86])
    pictures = Pictures(seeing)
    assert pictures.show(whole, job) is whole
    whole.step()
    inside = whole.offset
    whole.step()
    between = whole.offset
    whole.run()
    assert (inside, between) != (0, whole.rope_delta)
    assert whole.rope_delta < between < 0
    kept = Prefill(seeing, ids, lengths=[25, 60, len(ids) - 86])
    pictures.show(kept, job).step()
    kept.step()
    rest = Prefill(seeing, ids, kept.position, kept.caches, rope_delta=kept.offset)
    assert pictures.show(rest, job) is rest
    rest.run()
    for a, b in zip(whole.caches, rest.caches, strict=True):
        # The vision tower rounds differently for one image and for two.
        assert np.allclose(np.array(a.state[0]), np.array(b.state[0]), atol=1e-3)
    # Inside of an image there is no going on: the prompt is computed from its beginning.
    cut = Prefill(seeing, ids, lengths=[25, len(ids) - 26])
    pictures.show(cut, job).step()
    inside_one = Prefill(seeing, ids, 25, cut.caches, rope_delta=cut.offset)
    assert pictures.show(inside_one, job).position == 0


def test_ids_name_images(processor: Processor) -> None:
    one = processor.ids(picture(1))
    assert len(one) == 48
    assert all(token >= SEEN for token in one)
    assert one == names(picture(1), 48) != processor.ids(picture(2))
    assert len(set(one)) == 48
    assert len(processor.ids(picture(1, "JPEG"))) == 48
    assert processor.ids(picture(1, "WEBP", (16, 16))) == names(picture(1, "WEBP", (16, 16)), 4)


def test_what_is_no_image_is_refused(seeing: Model, processor: Processor) -> None:
    for data in (b"", b"nothing", picture(1)[:50], b"%!PS"):
        with pytest.raises(ModelError, match="cannot be read"):
            processor.ids(data)
    file = io.BytesIO()
    Image.new("L", (10_000, 6_000)).save(file, "PNG")
    with pytest.raises(ModelError, match="50 million"):
        open_image(file.getvalue())


def test_a_model_of_text_takes_no_images(loaded: Model, seeing: Model) -> None:
    with pytest.raises(ModelError, match="takes no images"):
        Processor(loaded.path)
    with pytest.raises(ModelError, match="outside the vocabulary"):
        loaded.check_ids([SEEN])
    with pytest.raises(ModelError, match="not here"):
        Prefill(seeing, [30, SEEN, 31]).run()
    with pytest.raises(ModelError, match="not here"):
        Row(seeing.fresh_cache(), [], [SEEN, 31]).check(seeing)


def test_the_child_process_answers_line_by_line(seeing: Model, loaded: Model) -> None:
    good = json.dumps({"image": base64.b64encode(picture(1)).decode()})
    bad = [json.dumps({"image": base64.b64encode(b"x").decode()}), "{}", "nothing"]
    out = io.StringIO()
    assert serve(seeing.path, io.StringIO("\n".join([good, *bad, good]) + "\n"), out) == 0
    first, *told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first == {"image_token": seeing.image_token}
    assert [list(each) for each in told] == [["ids"], ["error"], ["error"], ["error"], ["ids"]]
    assert told[0] == told[-1] == {"ids": names(picture(1), 48)}
    out = io.StringIO()
    assert serve(loaded.path, io.StringIO(), out) == 1
    assert "takes no images" in json.loads(out.getvalue())["error"]


@pytest.mark.rotate(3)
def test_a_child_that_has_died_is_started_again(seeing: Model) -> None:
    expander = Expander(seeing.path)
    assert expander.image_token == seeing.image_token
    child = expander._child
    assert child is not None
    child.kill()
    child.wait()
    assert expander.ids(picture(1)) == names(picture(1), 48)
    with pytest.raises(ImageError, match="cannot be read"):
        expander.ids(b"nothing")
    assert expander._child is not child
    expander.close()
    assert expander.ids(picture(1)) == names(picture(1), 48), "known without a child"


def test_an_older_processors_template_is_the_one(seeing: Model, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(seeing.path, folder)
    own = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": own}))
    assert Tokenizer.load(folder).template == load_tokenizer(folder).chat_template == own
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    kept = Tokenizer.load(seeing.path).template
    assert Tokenizer.load(folder).template == load_tokenizer(folder).chat_template == kept
