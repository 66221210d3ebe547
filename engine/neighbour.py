"""What prefill and decode cost each other where both workers run on one machine.

`python -P -m engine.neighbour MODEL prefill|decode` does that work over and over, from the line
"ready" on until its standard input closes; `beside` measures the other role meanwhile.
"""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.model import Model

ROLES = ("prefill", "decode")
ROUNDS = 5
CONTEXT = 64
STEPS = 4
READY_SECONDS = 300.0


def beside(
    model: Model,
    chunk: int = 0,
    *,
    roles: Sequence[str] = ROLES,
    prefix: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, float]:
    """How many times as long each of `roles` takes while another process does the other's work.

    Rounds alone stand before and after those beside it, so that a drift of the machine is not taken
    for an effect. `chunk`: tokens of a prefill forward, 0 for the model's; `prefix` begins the
    command line of the other process. Raises ModelError where that process does not start.
    """
    found: dict[str, float] = {}
    for role in roles:
        work = _work(model, role, chunk)
        other = ROLES[1 - ROLES.index(role)]
        work()
        alone = [_timed(work) for _ in range(ROUNDS)]
        with _neighbour(model.path, other, chunk, prefix):
            together = [_timed(work) for _ in range(ROUNDS)]
        alone += [_timed(work) for _ in range(ROUNDS)]
        ratio = statistics.median(together) / statistics.median(alone)
        found[role] = round(max(1.0, ratio), 3)
        say(f"{role} beside {other} on this machine: {ratio:.2f} times as long")
    return found


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _work(model: Model, role: str, chunk: int) -> Callable[[], object]:
    """One round of a role's work."""
    import mlx.core as mx

    from engine.prefill import Prefill
    from engine.probe import token_ids

    tokens = min(chunk or model.chunk, model.context_length - 1)
    if role == "prefill":
        ids = token_ids(model, tokens + 1, 1)
        return lambda: Prefill(model, ids, chunk=tokens).run()
    context = min(CONTEXT, model.context_length // 2)
    ids = token_ids(model, context + 1, 1)
    row = Prefill(model, ids).run()
    fed = mx.full((1, 1), 1, dtype=mx.int32)
    held = context

    def steps() -> None:
        nonlocal row, held
        if held + STEPS >= model.context_length:
            row, held = Prefill(model, ids).run(), context
        for _ in range(STEPS):
            mx.eval(mx.argmax(model.forward(fed, row, [0])[:, -1], axis=-1))
        held += STEPS

    return steps


@contextmanager
def _neighbour(path: Path, role: str, chunk: int, prefix: Sequence[str]) -> Iterator[None]:
    """Another process that works at `role` meanwhile."""
    command = [*prefix, sys.executable, "-P", "-m", "engine.neighbour", str(path), role, str(chunk)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
        if not told or process.stdout.readline() != "ready\n":
            raise ModelError(f"a second process that would {role} meanwhile did not start")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def main() -> int:
    """Work until standard input closes; returns the exit status."""
    from engine.device import prepare

    device = prepare()  # before anything below brings MLX in
    from engine.model import load

    work = _work(load(Path(sys.argv[1]), device), sys.argv[2], int(sys.argv[3]))
    work()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
