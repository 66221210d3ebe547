"""Decoding on the prefill node while nothing waits for it.

What is said here goes to the same event log, and the log is all that a later hand-off needs beside
the state: tokens are drawn by response seed and position, and penalties, stop strings, grammar and
length follow from the token ids.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from engine.decode import Batch, Event, Row
from engine.drafters import Drafter
from engine.errors import ModelError
from engine.grammar import Words
from engine.model import Caches, Model
from engine.profile import Profile
from scheduler.execution import Execution
from scheduler.nodes import Nodes
from scheduler.record import Job
from scheduler.staying import Choice, Mode, choose
from worker_decode.answers import Answer, grammar, sampling
from worker_decode.reader import Reader
from worker_decode.starts import Start

log = logging.getLogger("tandem.prefill")

#: Told after a step: the caches, and the answer so far, whose last token is not in them.
Grown = Callable[[Caches, Sequence[int]], None]


@dataclass(frozen=True)
class Live:
    """A conversation at one of its tokens: `caches` hold exactly `ids`, made by `schedule`."""

    caches: Caches
    ids: list[int]
    schedule: list[list[int]]
    tokens: int
    seconds: float
    ended: str

    def facts(self) -> dict[str, Any]:
        """For the hand-off's report."""
        return {"tokens": self.tokens, "seconds": self.seconds, "ended": self.ended}


class Late:
    """Decodes the answer to one prompt at a time. Used on the thread that loaded the model."""

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        max_output_tokens: int,
        working: Callable[[], AbstractContextManager[Any]] = nullcontext,
        drafter: Drafter | None = None,
        depth: int = 3,
        words: Words | None = None,
    ) -> None:
        """`max_output_tokens` where a request gives no limit; `working` wraps every step;
        `drafter` proposes up to `depth` tokens at a time; `words` are the tokenizer's."""
        self._model = model
        self._batch = Batch(model, 1, drafter=drafter, depth=depth)
        self._tokenizer = tokenizer
        self._limit = max_output_tokens
        self._working = working
        self._words = words or Words(tokenizer, model.vocab_size, model.eos_ids)

    def reach(self, job: Job) -> int:
        """The most tokens that the state of `job` can hold when its answer is at its end."""
        asked = (job.request.get("params") or {}).get("max_output_tokens")
        longest = job.prompt_tokens + int(asked or self._limit) - 1
        return max(job.prompt_tokens - 1, min(longest, self._model.context_length - 1))

    def decode(
        self,
        execution: Execution,
        job: Job,
        caches: Caches,
        schedule: list[list[int]],
        stay: Callable[[], bool],
        grown: Grown = lambda caches, said: None,
    ) -> Live | None:
        """Say the answer to a prompt whose last token is not yet in `caches`, while `stay()`.

        `grown` may send what is new in the caches.
        None, with `caches` untouched, where the request is one that the decode node has to refuse.
        What `stay` raises passes; the state is lost then. Raises ModelError where a step fails.
        """
        try:
            uid, answer = self._begin(execution, job, caches, schedule)
        except (ModelError, ValueError) as error:
            log.info("%s is not decoded here: %s", job.id, error)
            return None
        began = time.monotonic()
        try:
            last = self._say(uid, answer, stay, grown)
        except BaseException:
            if len(self._batch):
                self._batch.cancel(uid)
            raise
        assert last.caches is not None
        return Live(
            last.caches,
            last.ids,
            last.schedule,
            tokens=len(answer.ids),
            seconds=time.monotonic() - began,
            ended="" if last.finish == "cancelled" else str(last.finish),
        )

    def _say(self, uid: int, answer: Answer, stay: Callable[[], bool], grown: Grown) -> Event:
        """Step to the answer's end, or until it is to move; the row's last event."""
        while stay():
            with self._working():
                events = self._batch.step()
            for event in events:
                if event.finish == "error":
                    raise ModelError(event.error)
                answer.say(event)
                if event.finish is not None:
                    return event
            grown(self._batch.caches(uid), answer.ids)
        return self._batch.cancel(uid)

    def _begin(
        self, execution: Execution, job: Job, caches: Caches, schedule: list[list[int]]
    ) -> tuple[int, Answer]:
        model, ids = self._model, job.prompt_ids
        params = sampling(job, model.eos_ids, self._limit)
        reader = Reader(job, self._tokenizer, params.stop)
        start = Start("cold", caches, ids[:-1], schedule)
        uid = self._batch.add(
            Row(
                caches=caches,
                ids=start.ids,
                pending=ids[-1:],
                params=params,
                schedule=schedule,
                text=reader.stream(),
                grammar=grammar(job, reader, self._words),
            )
        )
        return uid, Answer(execution, job, start, reader, self._tokenizer, model.eos_ids)


def chooser(mode: Mode, profile: Profile | None, nodes: Nodes) -> Callable[[Job, int], Choice]:
    """The choice at a prompt's end, from this node's profile and what the decode node says."""

    def choice(job: Job, waiting: int) -> Choice:
        here = there = 0.0
        if mode == "late" and not waiting and profile is not None:
            here = profile.row_rate(1, job.prompt_tokens)
            node = nodes.get("decode", job.node)
            if node is not None:
                points = list(node.facts.get("decode_rates") or ())
                rows = int(node.facts.get("rows") or 0)
                remote = Profile("", "", "", decode=points)
                there = remote.row_rate(rows + 1, job.prompt_tokens)
        return choose(mode, waiting, here, there)

    return choice
