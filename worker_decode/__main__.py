"""`python -P -m worker_decode`: the decode worker of this machine, until SIGTERM."""

from __future__ import annotations

import sys

from engine.device import prepare
from scheduler.host import lifeline

if __name__ == "__main__":
    lifeline.watch()
    prepare()  # before anything below brings MLX in
    from worker_decode.process import main

    sys.exit(main())
