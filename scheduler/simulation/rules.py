"""The product's scheduling scripts, run in this process.

`scheduler/lua/policy.lua` and the scripts around it are the rule in use; here they run unchanged on
`memory.lua`, which stands for Redis. A test holds that both make the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler import policy, scripts
from scheduler.config import JobsConfig
from scheduler.record import JobError

#: Waiting jobs that a forecast looks at, as the product's does.
FORECAST = 250
_MEMORY = Path(__file__).with_name("memory.lua")
_WRAPPED = "return function(redis, cmsgpack, ARGV) {source}\nend"


class Rules:
    """Queues of jobs that exist as numbers. Times are seconds of the simulated clock.

    `rate`: tokens per second by which the rule turns tokens into seconds, as long as a queue has
    none of its own (`set_rate`).
    """

    def __init__(self, settings: JobsConfig, rate: float) -> None:
        """Raises JobError where the Lua interpreter is not installed."""
        try:
            from lupa import lua51
        except ImportError:
            raise JobError("the simulator needs lupa: pip install lupa") from None
        self._lua = lua51.LuaRuntime(unpack_returned_tuples=True)
        self._run, self._redis = self._lua.execute(_MEMORY.read_text(encoding="utf-8"))
        self._gain = settings.preempt_gain
        self._policy = self._table(policy.arguments(settings, rate))
        self._simulate = self._script("simulate")
        self._better = self._script("better")
        self._forecast = self._script("forecast")
        self._none = self._lua.table()
        self.waiting: dict[str, int] = {}
        """How many jobs wait in each queue."""

    def set_rate(self, queue: str, rate: float) -> None:
        """The measured tokens per second of a queue."""
        self._redis("SET", f"tandem:rate:{queue}", rate)

    def set_budget(self, node: str, limit: float, fixed: float, per_token: float) -> None:
        """What a decode node keeps of received state, in bytes; see `Runs.publish_budget`."""
        key = f"tandem:budget:{node}"
        self._redis("HSET", key, "limit", limit, "fixed", fixed, "per_token", per_token)

    def arrive(
        self,
        queue: str,
        number: int,
        at: float,
        tokens: int,
        owner: str = "",
        priority: str = "normal",
        *,
        stage: str = "prefill",
        held: int = 0,
        node: str = "",
        handed: bool = False,
    ) -> None:
        """A job of `tokens` prompt tokens waits in `queue` from now on; `handed`: its state came
        with it."""
        lua = self._lua
        row = lua.table(
            name(number), at, tokens, owner, priority, stage, held, node, "1" if handed else ""
        )
        self._call(queue, "", at, arrivals=lua.table(row))
        self.waiting[queue] = self.waiting.get(queue, 0) + 1

    def take(self, queue: str, holder: str, now: float) -> int | None:
        """The next job for `holder`, which then waits no longer; None where there is none."""
        if not self.waiting.get(queue):
            return None
        found = self._call(queue, holder, now, take=True)
        if found is None:
            return None
        self.waiting[queue] -= 1
        return int(found[1][5:], 16)

    def park(self, queue: str, holder: str, number: int, done: int, now: float) -> None:
        """Let a running job wait again; `holder` keeps `done` tokens of it."""
        self._call(queue, holder, now, park=self._lua.table(name(number), done))
        self.waiting[queue] = self.waiting.get(queue, 0) + 1

    def better(
        self, queue: str, holder: str, number: int, done: int, now: float
    ) -> tuple[bool, bool]:
        """At a chunk boundary: whether another job should run first, and whether a short
        interactive one waits."""
        if not self.waiting.get(queue):
            return False, False
        arguments = self._lua.table_from(
            {
                "id": name(number),
                "queue": queue,
                "holder": holder,
                "prefilled": done,
                "gain": self._gain,
                "now": now,
                "policy": self._policy,
            }
        )
        found = self._run(self._better, now, arguments)
        return bool(found[1]), bool(found[2])

    def wait(self, queue: str, tokens: int, owner: str, priority: str, now: float) -> float:
        """Seconds until a job of `tokens` new tokens would begin if it came now; see `Jobs`."""
        arguments = self._lua.table_from(
            {
                "queue": queue,
                "limit": FORECAST,
                "policy": self._policy,
                "tokens": max(1, tokens),
                "owner": owner,
                "priority": priority,
            }
        )
        return float(self._run(self._forecast, now, arguments)[1])

    def runs(self, queue: str, number: int, done: int, now: float) -> None:
        """A job is being served, `done` tokens of it so far."""
        self._redis("HSET", f"tandem:job:{name(number)}", "queue", queue, "prefilled_tokens", done)
        self._redis("ZADD", "tandem:leases", now, name(number))

    def stops(self, number: int) -> None:
        """It is not being served any more."""
        self._redis("ZREM", "tandem:leases", name(number))

    def release(self, number: int, now: float) -> None:
        """The memory that was promised for a job's state is free."""
        self._call("prefill", "", now, free=self._lua.table(name(number)))

    def forget(self, numbers: Sequence[int], now: float) -> None:
        """These jobs have ended."""
        self._call("prefill", "", now, gone=self._lua.table(*(name(k) for k in numbers)))

    def _call(self, queue: str, holder: str, now: float, **more: Any) -> Any:
        arguments = {
            "queue": queue,
            "holder": holder,
            "now": now,
            "arrivals": self._none,
            "policy": self._policy,
            **more,
        }
        return self._run(self._simulate, now, self._lua.table_from(arguments))

    def _script(self, which: str) -> Any:
        return self._lua.execute(_WRAPPED.format(source=scripts.source(which)))

    def _table(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._lua.table_from({key: self._table(item) for key, item in value.items()})
        return value


def name(number: int) -> str:
    """The id under which the scripts know a job."""
    return f"resp_{number:032x}"
