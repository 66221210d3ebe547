"""Where a forward's time goes inside a model: its modules timed one by one, evaluated between.

Evaluation after every part forbids MLX to overlap and fuse across parts, so the parts' sum is more
than the undivided forward takes; both are told. What is looked for is the division, not the sum.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

#: Rows below which a product is one of a matrix and single vectors: bound by reading the weights,
#: whatever units could multiply. A matrix unit's tile has eight.
ROWS = 8

MATMUL, EXPERTS, ATTENTION = "matmul", "expert matmul", "attention"
GATHER, SCAN, ROUTING = "attention gather", "recurrent scan", "expert routing"
NORMS, POSITIONS, EMBEDDING = "norms", "positions", "embedding"
LAYOUT, REST = "cache and layout", "rest of the model"

#: Functions of mlx-vlm that models import by name, and what they are.
FUNCTIONS = {
    "scaled_dot_product_attention": ATTENTION,
    "quantized_scaled_dot_product_attention": ATTENTION,
    "indexed_sparse_attention": GATHER,
    "_sparse_prefill_attention": GATHER,
    "sparse_attention": GATHER,
    "gated_delta_update": SCAN,
    "ssm_update": SCAN,
    "group_expert_select": ROUTING,
    "_gather_sort": ROUTING,
    "_scatter_unsort": ROUTING,
}


def kind_of(module: Any) -> str | None:
    """What a module's own time counts as, by the name of its class; None: its parent's."""
    name = type(module).__name__
    if "Switch" in name and name.endswith("Linear"):
        return EXPERTS
    if name.endswith("Linear"):
        return MATMUL
    if "Norm" in name and not name.endswith("Attention"):
        return NORMS
    if "Indexer" in name or "Compressor" in name:
        return GATHER
    if "Embedding" in name and "Rotary" not in name:
        return EMBEDDING
    if "RoPE" in name or "Rotary" in name or "Rope" in name:
        return POSITIONS
    if "Conv" in name or "Mamba" in name or "Recurrent" in name:
        return SCAN
    if "Gate" in name or "Router" in name or "MoE" in name or "Moe" in name:
        return ROUTING
    if "SwitchGLU" in name or "SwitchMLP" in name or "SparseMoe" in name:
        return ROUTING
    if "Attention" in name or "Delta" in name:
        return LAYOUT
    return None


class Probe:
    """Times the parts of a model while `watching`; the model is the same afterwards."""

    def __init__(self, lm: Any, factors: Mapping[int, float] | None = None) -> None:
        """`factors`: for modules (by id) that stand for several like them, how many; what is in
        them counts as often, in `seconds` and `usable`."""
        self._lm = lm
        self._factors = dict(factors or {})
        self._stack: list[tuple[str, float]] = []
        self._mark = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.usable = 0.0
        """Seconds of products that matrix units can form."""

    @contextmanager
    def watching(self) -> Iterator[Probe]:
        """Put the watch around every module and function, and take it off again."""
        modules: list[tuple[Any, type[Any]]] = []
        functions: list[tuple[Any, str, Any]] = []
        made: dict[tuple[type[Any], str], type[Any]] = {}
        try:
            for module in self._lm.modules():
                kind = kind_of(module) or (REST if id(module) in self._factors else None)
                own = type(module)
                if kind is None:
                    continue
                watched = made.get((own, kind)) or self._watched(own, kind)
                made[own, kind] = watched
                modules.append((module, own))
                object.__setattr__(module, "__class__", watched)
            for name in self._sources():
                space = sys.modules[name]
                for function, kind in FUNCTIONS.items():
                    original = getattr(space, function, None)
                    if callable(original):
                        functions.append((space, function, original))
                        setattr(space, function, self._around(original, kind))
            yield self
        finally:
            for space, function, original in reversed(functions):
                setattr(space, function, original)
            for module, own in modules:
                object.__setattr__(module, "__class__", own)

    def run(self, forward: Callable[[], Any]) -> float:
        """One forward, all its parts timed; seconds. What no part covers is `REST`."""
        began = self._mark = time.perf_counter()
        self._stack = [(REST, 1.0)]
        mx.eval(_arrays(forward()))
        self._charge()
        return self._mark - began

    def _sources(self) -> set[str]:
        """Modules of mlx-vlm whose functions this model may call."""
        used = {type(module).__module__ for module in self._lm.modules()}
        used |= {base.__module__ for m in self._lm.modules() for base in type(m).__mro__}
        return {name for name in used if name.startswith("mlx_vlm.") and name in sys.modules}

    def _watched(self, own: type[Any], kind: str) -> type[Any]:
        probe, original = self, own.__call__

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return probe.part(kind, original, (module, *args), kwargs)

        return type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})

    def _around(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.part(kind, original, args, kwargs)

        return call

    def part(self, kind: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function`, its inputs evaluated on its caller's account, its output on its own."""
        if not self._stack:
            return function(*args, **kwargs)
        inputs = _arrays((args, kwargs))
        mx.eval(inputs)
        self._charge()
        factor = self._factors.get(id(args[0]) if args else 0, self._stack[-1][1])
        self._stack.append((kind, factor))
        self.calls[kind] += 1
        before = self.seconds[kind]
        try:
            output = function(*args, **kwargs)
            mx.eval(_arrays(output))
            return output
        finally:
            self._charge()
            self._stack.pop()
            if _is_matrix(kind, args, inputs):
                self.usable += self.seconds[kind] - before

    def _charge(self) -> None:
        now = time.perf_counter()
        kind, factor = self._stack[-1]
        self.seconds[kind] += factor * (now - self._mark)
        self._mark = now


def _is_matrix(kind: str, args: Any, inputs: list[mx.array]) -> bool:
    """Whether a call multiplies matrices, rather than a matrix with a few vectors."""
    if not inputs:
        return False
    first = inputs[0]
    if kind == MATMUL:
        return first.size // first.shape[-1] >= ROWS
    if kind == EXPERTS:
        experts = int(getattr(args[0], "weight", first).shape[0])
        return first.size // first.shape[-1] >= ROWS * experts
    if kind == ATTENTION and first.ndim == 4:
        return first.shape[2] >= ROWS
    return False


def _arrays(value: Any) -> list[mx.array]:
    """The arrays in arguments or results; modules and caches are not looked into."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, Module):
        return []
    if isinstance(value, dict):
        return [array for each in value.values() for array in _arrays(each)]
    if isinstance(value, (list, tuple)):
        return [array for each in value for array in _arrays(each)]
    return []
