"""A whole stack for the chaos tests: the real supervisor, Redis and API around fake workers.

`python -P chaos_stack.py SPEC` is the supervisor; with `"part": "api"` in SPEC it is the API,
which has two named points of its own: just before and just after a job is accepted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from chaos_points import Points, write_pid

from scheduler.api import app as api
from scheduler.config import Config, load
from scheduler.host import stack
from scheduler.jobs import Jobs
from scheduler.record import Accepted, NewJob


def supervise(spec: dict[str, Any]) -> int:
    """What `tandem up` does, with other workers."""
    config = Config.model_validate(spec["config"])
    folder = Path(spec["dir"])
    write_pid(folder / "supervisor.pid", os.getpid())
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    shared = {"url": config.redis_url, "lock_dir": str(config.data_dir), **spec["worker"]}
    for role in ("prefill", "decode"):
        stack.MODULES[role] = ["jobs_worker", json.dumps({"role": role, **shared})]
    stack.MODULES["api"] = ["chaos_stack", json.dumps({**spec, "part": "api"})]
    running = stack.Stack(config)
    running.supervisor.install_signals()
    try:
        running.start()
        running.supervisor.run()
    except stack.StackFailed:
        return 0 if running.supervisor.stopping else 1
    finally:
        running.stop()
    return 0


def serve(spec: dict[str, Any]) -> int:
    """The API with its points."""
    write_pid(Path(spec["dir"]) / "api.pid", os.getpid())
    points = Points(spec["worker"])
    accept = Jobs.accept

    def accept_at_points(jobs: Jobs, new: NewJob) -> Accepted:
        points.at("before_accept")
        accepted = accept(jobs, new)
        points.at("after_accept")
        return accepted

    setattr(Jobs, "accept", accept_at_points)  # noqa: B010  # the points are this test's only
    return api.serve(load())


def main() -> int:
    """The supervisor, or what it starts as the API."""
    spec = json.loads(sys.argv[1])
    logging.basicConfig(level="ERROR")
    return serve(spec) if spec.get("part") == "api" else supervise(spec)


if __name__ == "__main__":
    sys.exit(main())
