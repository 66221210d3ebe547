"""`python -P -m worker_prefill`: the prefill worker of this machine, until SIGTERM."""

from __future__ import annotations

import sys

from engine.device import prepare
from scheduler.host import lifeline

if __name__ == "__main__":
    lifeline.watch()
    prepare()  # before anything below brings MLX in
    from worker_prefill.process import main

    sys.exit(main())
