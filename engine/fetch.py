"""`python -P -m engine.fetch NAME --models-dir DIR`: find or fetch a model, for other processes.

Prints JSON lines: `{"stage", "done", "total"}` while that takes time, then `{"path"}`, or
`{"error"}` with exit status 1. Never imports MLX.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from engine.errors import ModelError
from engine.library import resolve


def main() -> int:
    """Resolve the model named on the command line."""
    parser = argparse.ArgumentParser(prog="engine.fetch")
    parser.add_argument("name")
    parser.add_argument("--models-dir", type=Path, required=True)
    args = parser.parse_args()
    # An exception, so that what is half made is removed and pip is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def progress(stage: str, done: int, total: int) -> None:
        print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)

    try:
        path = resolve(args.name, args.models_dir, progress)
    except ModelError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"path": str(path)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
