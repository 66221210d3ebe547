"""How a worker's process begins, and what its exit status says when it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from scheduler.config import Config, ConfigError, load
from scheduler.host import data_dir
from scheduler.host.supervisor import CONFIGURATION
from scheduler.record import JobError

log = logging.getLogger("tandem")


def run_role(
    run: Callable[[Config, Path], int],
    *,
    for_good: tuple[type[Exception], ...],
    for_now: tuple[type[Exception], ...] = (),
) -> int:
    """Run a worker with this process's configuration and its model's directory.

    Errors of `for_good`, and a wrong configuration, end with the status that tells the supervisor
    not to try again; those of `for_now` with 1. Each is one line in the log.
    """
    permanent: tuple[type[Exception], ...] = (ConfigError, *for_good)
    passing: tuple[type[Exception], ...] = (JobError, *for_now)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        config = load()
        data_dir.prepare(config)
        if config.model_dir is None:
            raise ConfigError("model_dir is not set: start this worker with `tandem worker ROLE`")
        return run(config, config.model_dir)
    except permanent as error:
        log.error("%s", error)
        return CONFIGURATION
    except passing as error:
        log.error("%s", error)
        return 1
