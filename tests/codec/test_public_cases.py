"""Reports from people who did this job before, as tests of the state format.

The case, what went wrong there, and what stands for it here:

- C01: a wrapped ring was cut as if it were flat. Here: the format never trims; `test_rings`
  round trips W-1, W, W+1, 2W.
- C02: trimmability guessed from attribute names. Here: as C01; a class is known by its full
  name, see `test_classes`.
- C04: padding fed into recurrent state. Here: cannot apply: the format moves one unpadded row;
  batches are refused, see `test_classes`.
- C05: material of other prompts in the batch. Here: cannot apply: nothing is batched here;
  `test_two_states_share_nothing`.
- C06: padded buffers stored, older files misread. Here: `test_bytes_follow_tokens`,
  `test_other_formats_are_a_miss`.
- C07: restored objects lack attributes. Here: `test_models` goes on decoding, `test_round_trip`
  goes on filling; `test_restored_caches_work`.
- C08: nested lists were not carried. Here: `test_nested_pairs`.
- C10: quantised KV silently not kept. Here: `llama_kv8` of `test_models`; other schemes refused
  at start-up, see `test_classes`.
- C11: bfloat16 became float16. Here: `test_bfloat16_keeps_every_bit`.
- C12: bits of one type read as another. Here: `test_one_16_bit_type_is_not_the_other`.
- C13: position offsets of images kept on the model. Here: the offset travels in `extra`, see
  C14; keeping it per request is the engine's.
- C14: a saved image conversation lost its offset. Here:
  `test_what_the_model_keeps_outside_travels`.
- C15: same text, other picture: shared state. Here: `test_another_picture_is_another_state`.
- C16: picture identity squeezed to 16 bits. Here: `test_picture_identity_is_not_squeezed`.
- C17: the same picture, prepared otherwise. Here: `test_chain`: the mark covers pixels as the
  model gets them, shape and dtype.
- C18: a saver thread touched unevaluated arrays. Here:
  `test_another_thread_may_have_the_pieces`.
- C19: positions ran ahead of the token list. Here:
  `test_a_position_beside_the_token_list_is_refused`.
- C22: arrays saved over the file they are read from. Here: cannot apply: no file is read
  lazily; `test_pieces_outlive_the_caches`.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import made_caches
import mlx.core as mx
import pytest
from mlx_vlm.models import cache as classes
from tiny_models import TINY, prompt

from store.codec.chain import Chain, Mark, image_mark
from store.codec.header import FORMAT, CodecError, Piece, parse, root
from store.codec.layout import Layout
from store.codec.pack import Exporter, export_rows, export_snapshot
from store.codec.unpack import Importer

MODEL = b"m" * 16
IDS = list(range(400))


def layout_of(recipe: Any, tokens: int = 16) -> Layout:
    probe = made_caches.fresh(recipe)
    made_caches.fill(probe, recipe, [tokens], 1)
    return Layout.of(probe, "any", MODEL, tokens=tokens, value_bytes=1)


def pieces_of(layout: Layout, caches: Any, held: int, **extra: Any) -> list[Piece]:
    exporter = Exporter(layout, IDS)
    return [*exporter.rows(caches, held, last=True), exporter.snapshot(caches, extra)]


def restored(layout: Layout, fresh: Any, pieces: list[Piece]) -> Any:
    importer = Importer(layout, fresh, MODEL, pieces[-1].header.stop)
    importer.add_all(pieces[:-1])
    return importer.finish(pieces[-1])


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array).view(mx.uint8)))


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("held", [1, 7, 8, 9, 13, 16, 17, 20])
@pytest.mark.parametrize("by_token", [False, True])
def test_rings(held: int, keep: int, by_token: bool) -> None:
    """C01: at every length around the window, and on after it."""
    recipe = [
        {
            "class": "RotatingKVCache",
            "heads": 1,
            "keys": 4,
            "values": 4,
            "window": 8,
            "keep": keep,
            "dtype": "bfloat16",
        }
    ]
    layout = layout_of(recipe)
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, [1] * held if by_token else [held], 3)
    again = restored(layout, made_caches.fresh(recipe), pieces_of(layout, caches, held))
    assert made_caches.told(again, recipe) == made_caches.told(caches, recipe)
    for more in ([1, 1, 1], [5], [1] * 9):
        made_caches.fill(caches, recipe, more, 4, start=held)
        made_caches.fill(again, recipe, more, 4, start=held)
        held += sum(more)
        assert made_caches.told(again, recipe) == made_caches.told(caches, recipe)


def key_values(tokens: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    mx.random.seed(seed)
    return mx.random.normal((1, 2, tokens, 4)).astype(dtype)


def held_cache(tokens: int, seed: int = 1, dtype: mx.Dtype = mx.float32) -> classes.KVCache:
    cache = classes.KVCache()
    cache.update_and_fetch(key_values(tokens, seed, dtype), key_values(tokens, seed + 1, dtype))
    return cache


def test_two_states_share_nothing() -> None:
    """C05: writing one restored conversation leaves the other as it was."""
    layout = Layout.of([held_cache(16)], "any", MODEL)
    pieces = pieces_of(layout, [held_cache(20)], 20)
    one, two = (restored(layout, [classes.KVCache()], pieces) for _ in range(2))
    before = bits(two[0].state[0])
    one[0].trim(8)
    one[0].update_and_fetch(key_values(8, 9), key_values(8, 9))
    mx.eval(one[0].state)
    assert bits(two[0].state[0]) == before
    assert bits(one[0].state[0]) != before


def test_bytes_follow_tokens() -> None:
    """C06: five tokens in a buffer of 256 rows are five rows; what another branch left behind
    the position is not stored."""
    layout = Layout.of([held_cache(16)], "any", MODEL)
    cache = held_cache(5)
    assert cache.keys.shape[2] == 256
    pieces = pieces_of(layout, [cache], 5)
    assert sum(piece.payload.nbytes for piece in pieces) == 5 * layout.row_bytes
    branched = held_cache(5)
    branched.update_and_fetch(key_values(30, 8), key_values(30, 8))
    branched.trim(30)
    again = pieces_of(layout, [branched], 5)
    assert [piece.header for piece in again] == [piece.header for piece in pieces]
    assert [bytes(piece.payload) for piece in again] == [bytes(piece.payload) for piece in pieces]


def test_other_formats_are_a_miss() -> None:
    """C06: a state of another format says so and asks for recomputation."""
    layout = Layout.of([held_cache(16)], "any", MODEL)
    piece = pieces_of(layout, [held_cache(5)], 5)[0]
    later = bytearray(piece.header.pack())
    with pytest.raises(CodecError):
        parse(bytes(later).replace(b"TDMS", b"SAFE"))
    assert piece.header.version == FORMAT


def test_restored_caches_work() -> None:
    """C07: merged, filtered, extracted and trimmed as if they had never been away."""
    entry = TINY["nemotron_h"]
    model = entry.build()
    probe = entry.fresh_cache(model)
    entry.step(model, prompt(16), probe)
    layout = Layout.of(probe, entry.name, MODEL, value_bytes=1)
    rows = []
    for held in (30, 41):
        caches = entry.fresh_cache(model)
        entry.step(model, prompt(held), caches)
        again = restored(layout, entry.fresh_cache(model), pieces_of(layout, caches, held))
        rows.append((caches, again))
    found = []
    for side in range(2):
        batch = [
            type(layers[0]).merge(list(layers))
            for layers in zip(*(row[side] for row in rows), strict=True)
        ]
        logits = model(mx.array([[5], [6]]), cache=batch).logits
        for cache in batch:
            cache.filter(mx.array([1]))
        row = [cache.extract(0) for cache in batch]
        found.append((bits(logits), bits(entry.step(model, [7], row))))
    assert found[0] == found[1]


def test_nested_pairs() -> None:
    """C08: (attention, recurrent) pairs, nested twice, in order."""
    pair = {
        "list": [
            {"class": "KVCache", "heads": 1, "keys": 2, "values": 2, "dtype": "float16"},
            {"class": "ArraysCache", "slots": [[1, 2], [1, 3]], "padded": False},
        ],
        "as": "CacheList",
    }
    recipe = [{"list": [pair, {"list": [pair, pair], "as": "CacheList"}], "as": "CacheList"}]
    layout = layout_of(recipe)
    caches = made_caches.fresh(recipe)
    made_caches.fill(caches, recipe, [9, 1], 5)
    again = restored(layout, made_caches.fresh(recipe), pieces_of(layout, caches, 10))
    assert made_caches.told(again, recipe) == made_caches.told(caches, recipe)
    assert [slot.path for slot in layout.slots] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0, 0),
        (0, 1, 0, 1),
        (0, 1, 1, 0),
        (0, 1, 1, 1),
    ]


def test_bfloat16_keeps_every_bit() -> None:
    """C11: all 65,536 patterns, beyond float16's range, subnormals and NaNs among them."""
    every = mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16).view(mx.bfloat16)
    cache = classes.KVCache()
    cache.update_and_fetch(every.reshape(1, 1, 256, 256), every.reshape(1, 1, 256, 256)[:, :, ::-1])
    state = classes.ArraysCache(1)
    state[0] = every.reshape(1, 256, 256).transpose(0, 2, 1)  # with gaps
    layout = Layout.of([cache, state], "any", MODEL)
    pieces = pieces_of(layout, [cache, state], 256)
    assert {run.dtype for piece in pieces for run in piece.header.runs} == {"bfloat16"}
    again = restored(layout, [classes.KVCache(), classes.ArraysCache(1)], pieces)
    assert again[0].keys.dtype == mx.bfloat16
    assert bits(again[0].state[0]) == bits(cache.state[0])
    assert bits(again[0].state[1]) == bits(cache.state[1])
    assert bits(again[1][0]) == bits(state[0])


def test_one_16_bit_type_is_not_the_other() -> None:
    """C12: state of a bfloat16 model is refused by a float16 model of the same shapes."""
    for one, other in ((mx.bfloat16, mx.float16), (mx.float16, mx.bfloat16)):
        written = Layout.of([held_cache(16, dtype=one)], "any", MODEL)
        pieces = pieces_of(written, [held_cache(5, dtype=one)], 5)
        reading = Layout.of([held_cache(16, dtype=other)], "any", MODEL)
        with pytest.raises(CodecError, match="this model's is"):
            restored(reading, [classes.KVCache()], pieces)
        stranger = Layout.of([held_cache(16, dtype=other)], "any", b"n" * 16)
        with pytest.raises(CodecError, match="another model"):
            Importer(stranger, [classes.KVCache()], b"n" * 16, 5).add(pieces[0])


def test_what_the_model_keeps_outside_travels() -> None:
    """C13, C14: rope offset and pending ids come along, or the export fails."""
    layout = Layout.of([held_cache(16)], "any", MODEL)
    outside = {"rope_delta": -37, "pending": [7, 9], "schedule": [[5, 1]]}
    snapshot = export_snapshot(
        layout, [held_cache(5)], IDS, 5, outside, provenance={"chip": "M5 Max"}
    )
    read = parse(snapshot.header.pack())
    assert read.extra == outside
    assert read.provenance["chip"] == "M5 Max"
    assert read.provenance["device"] in ("cpu", "metal")
    assert read.provenance["mlx"]
    with pytest.raises(CodecError):
        export_snapshot(layout, [held_cache(5)], IDS, 5, {"rope_delta": mx.zeros(1)}).header.pack()


def test_another_picture_is_another_state() -> None:
    """C15: the same placeholder ids with other pictures never continue each other, while what
    lies before the picture is shared."""
    layout = Layout.of([held_cache(16)], "any", MODEL, value_bytes=1)
    block = layout.block_tokens
    held = 3 * block
    red, blue = (image_mark(block + 3, bytes([tone] * 48), (4, 4, 3), "uint8") for tone in (1, 2))
    chains = {}
    for name, marks in (("red", [red]), ("blue", [blue]), ("red again", [red]), ("none", [])):
        pieces = export_rows(layout, [held_cache(held)], IDS, 0, held, marks=marks)
        chains[name] = [piece.header.chain for piece in pieces]
    assert chains["red"] == chains["red again"]
    assert len({chain[0] for chain in chains.values()}) == 1
    for index in (1, 2):
        assert len({chain[index] for chain in chains.values()}) == 3
    pieces = export_rows(layout, [held_cache(held)], IDS, 0, held, marks=[red])
    other = export_rows(layout, [held_cache(held)], IDS, 0, held, marks=[blue])
    importer = Importer(layout, [classes.KVCache()], MODEL, held)
    importer.add_all(pieces[:2])
    with pytest.raises(CodecError, match="other token ids"):
        importer.add(other[2])


def test_picture_identity_is_not_squeezed() -> None:
    """C16: pictures whose digests agree in their last 16 bits stay apart."""
    seen: dict[bytes, bytes] = {}
    for number in range(1 << 12):
        pixels = number.to_bytes(4, "big")
        tail = hashlib.blake2b(pixels, digest_size=32).digest()[-2:]
        if tail in seen:
            one, two = (image_mark(0, data, (2, 2), "uint8") for data in (seen[tail], pixels))
            assert len(one.content) == 32
            seed = root(MODEL)
            assert Chain(seed, [1], 16, [one]).at(1) != Chain(seed, [1], 16, [two]).at(1)
            return
        seen[tail] = pixels
    raise AssertionError("no two digests agreed")


def test_marks_are_framed() -> None:
    """C16: two marks are not one whose content runs on."""
    seed = root(MODEL)
    two = Chain(seed, [1] * 4, 16, [Mark(0, b"ab"), Mark(1, b"cd")]).at(4)
    one = Chain(seed, [1] * 4, 16, [Mark(0, b"abcd")]).at(4)
    assert one != two


def test_another_thread_may_have_the_pieces() -> None:
    """C18: lazy arrays are evaluated where they belong; the pieces then go to any thread, also
    after their own has ended."""
    layout = Layout.of([held_cache(16), classes.ArraysCache(1)], "any", MODEL)
    made: list[list[Piece]] = []

    def engine() -> None:
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            for seed in range(20):
                cache, state = held_cache(20, seed), classes.ArraysCache(1)
                state[0] = key_values(3, seed) * 2 + 1  # never evaluated by anybody else
                made.append(pieces_of(layout, [cache, state], 20))

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    failures: list[BaseException] = []

    def saver() -> None:
        try:
            for pieces in made:
                for piece in pieces:
                    piece.verify()
                    assert len(bytes(piece.payload)) == piece.header.nbytes
        except BaseException as error:
            failures.append(error)

    savers = [threading.Thread(target=saver) for _ in range(3)]
    for one in savers:
        one.start()
    for one in savers:
        one.join()
    assert failures == []
    assert len(made) == 20


def test_a_position_beside_the_token_list_is_refused() -> None:
    """C19: at every boundary the caches stand where the ids end, or the export fails loudly."""
    layout = Layout.of([held_cache(16)], "any", MODEL)
    for held in (1, 15, 16, 17, 64):
        export_snapshot(layout, [held_cache(held)], IDS[:held], held)
        for wrong in (held - 1, held + 1):
            with pytest.raises(CodecError):
                export_snapshot(layout, [held_cache(wrong)] if wrong else [], IDS[:held], held)
    twice = [held_cache(5), held_cache(6)]
    with pytest.raises(CodecError, match="disagree"):
        export_rows(Layout.of([held_cache(16)] * 2, "any", MODEL), twice, IDS, 0, 5)


def test_pieces_outlive_the_caches() -> None:
    """C22 and the like: a piece is a copy; what the engine does next does not reach it."""
    cache = held_cache(20)
    layout = Layout.of([held_cache(16)], "any", MODEL)
    pieces = pieces_of(layout, [cache], 20)
    before = [bytes(piece.payload) for piece in pieces]
    cache.trim(20)
    cache.update_and_fetch(key_values(20, 99), key_values(20, 98))
    mx.eval(cache.state)
    del cache
    assert [bytes(piece.payload) for piece in pieces] == before
    for piece in pieces:
        piece.verify()


def test_payload_buffers_are_used_again_only_when_nobody_holds_them() -> None:
    layout = Layout.of([held_cache(16)], "any", MODEL, value_bytes=1)
    kept = pieces_of(layout, [held_cache(200, 1)], 200)
    parts = [piece.payload[3:9] for piece in kept]
    expected = [bytes(part) for part in parts]
    del kept
    for seed in range(30):
        pieces_of(layout, [held_cache(200, seed)], 200)
    assert [bytes(part) for part in parts] == expected
