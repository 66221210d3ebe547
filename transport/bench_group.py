"""One rank of a bare mx.distributed group, for the benchmark: send, receive, a small answer.

Started as `python -P -m transport.bench_group` with MLX_RANK and MLX_HOSTFILE set. Each line on
stdin is a count of bytes; rank 0 sends them and prints the seconds until the answer came.
"""

from __future__ import annotations

import sys
import time


def main() -> None:
    """Serve lines until stdin ends."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(1 << 30)
    group = mx.distributed.init(strict=True, backend="ring")
    rank = group.rank()
    answer = mx.zeros((16,), dtype=mx.uint8)
    held: dict[int, mx.array] = {}
    print("up", flush=True)
    for line in sys.stdin:
        nbytes = int(line)
        if rank == 0 and nbytes not in held:
            held = {nbytes: mx.ones((nbytes,), dtype=mx.uint8)}
            mx.eval(held[nbytes])
        begun = time.perf_counter()
        if rank == 0:
            mx.eval(mx.distributed.send(held[nbytes], 1, group=group))
            mx.eval(mx.distributed.recv((16,), mx.uint8, 1, group=group))
        else:
            got = mx.distributed.recv((nbytes,), mx.uint8, 0, group=group)
            mx.eval(got)
            del got
            mx.eval(mx.distributed.send(answer, 0, group=group))
        print(time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
