"""Every cache class of the library is in the table, and nothing else gets in.

The walk is over the library's source, all of it, so that a class or a `make_cache` that a new
release brings fails here by name before any state of it is lost.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models import cache as classes
from tiny_models import TINY

from store.codec.classes import CONTAINERS, REFUSED, TABLE, row_for
from store.codec.header import CodecError
from store.codec.layout import Layout, children, position
from store.codec.transient import NullKVCache

KNOWN = {*TABLE, *REFUSED, *CONTAINERS}
# What looks like a cache in the source and holds no state of a conversation.
NO_STATE = {
    "mlx_vlm.models.cache._BaseCache",  # the base class
    "mlx_vlm.models.cache.CacheMemory",  # a description of memory
    "mlx_vlm.vision_cache.VisionFeatureCache",  # image features by image
    "mlx_vlm.server.runtime.ModelCacheRegistry",  # loaded models
    "mlx_vlm.trainer.datasets.loading.CacheDataset",  # training data
    "mlx_vlm.generate.common.PromptCacheState",  # holds a cache list
    "mlx_vlm.speculative.cache_state._RotatingCacheTransaction",  # one open step
    "mlx_vlm.speculative.cache_state.SpeculativeCacheTransaction",
    "mlx_vlm.apc_adapters.CacheSpec",  # descriptions
    "mlx_vlm.apc_adapters.CacheGroupSpec",
    "mlx_vlm.apc_adapters.PrefixCachePlan",
    "mlx_vlm.apc.APCExactCacheEntry",  # the library's own prefix cache
    "mlx_vlm.apc._DiskExactCacheSnapshot",
    "mlx_vlm.apc_storage.KVBlockHandle",
    "mlx_vlm.turboquant._TurboQuantAttentionMixin",  # a mixin of the classes refused
    "mlx_vlm.kv_quant.KVQuantSpec",
    "mlx_vlm.kv_quant.KVQuantPolicy",
    "mlx_vlm.models.afm7.language.KVReuseAttention",  # layers
    "mlx_vlm.models.afm7.language.KVReuseTransformerBlock",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    spec = find_spec("mlx_vlm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (location,) = spec.submodule_search_locations
    for path in sorted(Path(location).rglob("*.py")):
        parts = path.relative_to(location).with_suffix("").parts
        name = ".".join(("mlx_vlm", *(part for part in parts if part != "__init__")))
        yield name, ast.parse(path.read_text(encoding="utf-8"))


SOURCE = dict(modules())


def looks_like_a_cache(node: ast.ClassDef) -> bool:
    bases = {
        base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for base in node.bases
    }
    methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    return (
        "cache" in node.name.lower()
        or "KV" in node.name
        or any(base.endswith("Cache") for base in bases)
        or "update_and_fetch" in methods
        or {"state", "meta_state"} <= methods
    )


def test_every_class_that_looks_like_a_cache_is_known() -> None:
    found = {
        f"{name}.{node.name}"
        for name, tree in SOURCE.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and looks_like_a_cache(node)
    }
    assert len(found) > 30
    assert found - KNOWN - NO_STATE == set(), "new cache classes: give each a row in the table"
    gone = {name for name in KNOWN | NO_STATE if name.startswith("mlx_vlm.")} - found
    assert gone == set(), "classes that the library no longer has: take their rows out"


def imported(tree: ast.Module, module: str) -> dict[str, str]:
    """Names in a module as full names, as far as its imports tell."""
    names = {}
    package = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names[node.name] = f"{module}.{node.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                names[alias.asname or alias.name] = f"{source}.{alias.name}"
    return names


def test_every_make_cache_makes_known_classes() -> None:
    makers, strange = 0, {}
    short = {known.rpartition(".")[2] for known in KNOWN - set(REFUSED)}
    for module, tree in SOURCE.items():
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name in ("make_cache", "make_prompt_cache")
        ]
        names = imported(tree, module) if found else {}
        for node in found:
            makers += 1
            for call in ast.walk(node):
                if not isinstance(call, ast.Call):
                    continue
                name = getattr(call.func, "id", getattr(call.func, "attr", ""))
                full = names.get(name, name)
                if name.endswith("Cache") or name in ("CacheList",):
                    # Re-exports are resolved by the class's own module in the test above.
                    if full not in KNOWN and name not in short:
                        strange[f"{module}.{node.name}"] = full
                    # A drafter's own cache is rebuilt with each run and belongs to no state.
                    if full in REFUSED and ".drafters." not in module:
                        strange[f"{module}.{node.name}"] = full
    assert makers > 200
    assert strange == {}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {name: entry.fresh_cache(entry.build()) for name, entry in TINY.items()}


def test_the_tiny_models_fill_every_class_of_the_table(made: dict[str, Any]) -> None:
    seen = {slot.name for name, caches in made.items() for slot in Layout.of(caches, name).slots}
    assert {name for name in TABLE if name.startswith("mlx_vlm.")} - seen == set()
    assert len(made) >= 16


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_classes_say_what_to_do(name: str) -> None:
    with pytest.raises(CodecError, match=name.rpartition(".")[2]):
        row_for(name)


def test_unknown_classes_are_refused_at_start_up_by_name() -> None:
    class BrandNewCache(classes.KVCache):
        """A subclass is another class: what it adds would be lost."""

    # The sister library's class of the same name keeps its state otherwise.
    namesake = type("KVCache", (), {"__module__": "mlx_lm.models.cache"})
    for stranger in (BrandNewCache(), namesake(), SimpleNamespace(), object()):
        name = type(stranger).__qualname__
        with pytest.raises(CodecError, match=name.rpartition(".")[2]):
            Layout.of([classes.KVCache(), classes.CacheList(classes.KVCache(), stranger)], "any")


def test_a_batch_is_refused() -> None:
    with pytest.raises(CodecError, match="extract"):
        Layout.of([classes.BatchKVCache([0, 1])], "any")


def test_lists_that_never_end_or_hold_nothing_are_refused() -> None:
    nested: Any = classes.KVCache()
    for _ in range(12):
        nested = classes.CacheList(nested)
    with pytest.raises(CodecError, match="nested"):
        Layout.of([nested], "any")
    for nothing in ([], [None]):
        with pytest.raises(CodecError):
            Layout.of(nothing, "any")


def test_containers_keep_their_order() -> None:
    inner = classes.CacheList(classes.ArraysCache(1), (classes.KVCache(), None))
    layout = Layout.of([None, inner], "any")
    assert [slot.path for slot in layout.slots] == [(1, 0), (1, 1, 0)]
    assert children(classes.KVCache()) is None


def keys(tokens: int) -> mx.array:
    return mx.zeros((1, 1, tokens, 4))


def test_positions_that_disagree_are_an_error() -> None:
    caches = [classes.KVCache(), classes.ArraysCache(1), classes.KVCache()]
    layout = Layout.of(caches, "any")
    assert position(layout, caches) is None
    caches[0].update_and_fetch(keys(5), keys(5))
    assert position(layout, caches) == 5
    caches[2].update_and_fetch(keys(6), keys(6))
    with pytest.raises(CodecError, match=r"layer 0 at 5, layer 2 at 6"):
        position(layout, caches)


def test_the_position_of_a_pool_counts_its_remainder() -> None:
    cache = classes.PoolingCache(4)
    layout = Layout.of([cache], "any")
    for total in range(1, 20):
        ready, _, _ = cache.accumulate_windows(mx.zeros((1, 1, 2)), mx.zeros((1, 1, 2)), total - 1)
        cache.update_and_fetch(ready[:, ::4])
        assert position(layout, [cache]) == total


def test_only_the_projected_slot_of_glm5_next_is_transient() -> None:
    caches = [
        classes.ArraysCache(2),
        classes.CacheList(classes.KVCache(), classes.KVCache()),
        classes.CacheList(
            classes.KVCache(), classes.KVCache(), classes.PoolingCache(16), classes.KVCache()
        ),
    ]
    transient = [slot.path for slot in Layout.of(caches, "glm5_next").slots if slot.transient]
    assert transient == [(1, 1), (2, 3)]
    assert not any(slot.transient for slot in Layout.of(caches, "deepseek_v32").slots)


def test_a_null_cache_answers_the_batching_protocol() -> None:
    caches = classes.CacheList(classes.KVCache(), NullKVCache())
    caches.caches[0].update_and_fetch(keys(3), keys(3))
    batch = classes.CacheList.merge([caches, caches])
    batch.filter(mx.array([0]))
    batch.extend(classes.CacheList.merge([caches]))
    row = batch.extract(1)
    assert isinstance(row.caches[1], NullKVCache)
    assert row.caches[0].offset == 3
    null = row.caches[1]
    assert (null.size(), null.empty(), null.nbytes, null.state) == (-1, True, 0, ())
    null.state = ()
    with pytest.raises(CodecError):
        null.state = (1,)
    with pytest.raises(CodecError):
        null.update_and_fetch(keys(1), keys(1))
