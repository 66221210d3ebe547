"""The decode node's engine: jobs in a batch, conversations between their turns, the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

from engine.decode import Batch
from engine.device import kernels
from engine.drafters import find_drafter
from engine.errors import ModelError
from engine.grammar import Grammar, Words
from engine.keepalive import KeepAlive
from engine.model import Caches, Model
from engine.rows import Event, Row
from scheduler.config import Config
from scheduler.execution import Execution, Finished
from scheduler.leaving import Tail
from scheduler.ledger.clock import Clock
from scheduler.record import Job, JobError, Result
from scheduler.runs import SendBack
from store.errors import StoreFull
from store.meter import charge
from store.store import Store
from worker_decode.answers import Answer, grammar, grammar_asked, sampling
from worker_decode.early import Early
from worker_decode.hot import Held
from worker_decode.inbox import Inbox
from worker_decode.keeping import Keeping
from worker_decode.ledgers import Ledgers
from worker_decode.lending import Lending
from worker_decode.memory import Memory
from worker_decode.moving import Sender, state_of
from worker_decode.pictures import Pictures
from worker_decode.preamble import Sharing
from worker_decode.reader import Reader
from worker_decode.starts import Starts
from worker_decode.states import nbytes_of
from worker_decode.timing import Loop, Watch, note_forks
from worker_decode.turns import compose, record

log = logging.getLogger("tandem.decode")

_HOUSEKEEPING = 0.25
_WORD = 2.0
_SWEEP = 10.0
_RETRY = 30.0

#: Why a state is cold that no prefill node has sent.
COMPUTED_HERE = "no prefill node computed it: it is computed here"
#: What finding a state is called, by where it was.
_STAGES = {
    "cold": "unpack",
    "extended": "unpack",
    "restored": "restore",
    "hot": "take over",
    "recomputed": "begin",
}


class Engine:
    """What `DecodeLoop` drives. All methods are called on the thread that loaded the model."""

    def __init__(
        self,
        config: Config,
        model: Model,
        tokenizer: Any,
        store: Store,
        memory: Memory,
        inbox: Inbox,
        *,
        ended: Callable[[str], bool],
        announce: Callable[[dict[str, Any]], None] = lambda facts: None,
        pulse: KeepAlive | None = None,
        lending: Lending | None = None,
        clock: Clock | None = None,
        tell: Callable[[str, str, bytes], None] = lambda turn, name, piece: None,
        words: Words | None = None,
        mover: Sender | None = None,
    ) -> None:
        """`ended(response)` says whether a job is over, for state that nobody came to take;
        `announce(facts)` is told now and then how this node stands; `pulse` keeps an idle device
        awake; `clock` is the loop's; `tell(turn, name, piece)` adds to the ledger of an ended job;
        `words` are the tokenizer's; `mover` sends answers on to another decode node.
        Raises ModelError where `decode.drafter` names what cannot be had."""
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._store = store
        self._memory = memory
        self._inbox = inbox
        self._pulse = pulse
        self._mover = mover
        self._working = nullcontext if pulse is None else pulse.working
        self._ledgers = Ledgers(store, clock or Clock(), config.node, tell)
        self.kept = Keeping(
            config,
            model,
            store,
            memory,
            inbox,
            self._ledgers,
            lending,
            running=self._running,
            ended=ended,
            announce=lambda: announce(self.facts()),
            lost=lambda turn: self._sharing.ended(turn, kept=False),
        )
        self._early = Early(model, inbox, memory)
        self._starts = Starts(
            model,
            store,
            self.kept.hot,
            inbox,
            config.decode.local_prefill_tokens,
            self.kept.behind,
            config.store.snapshots,
            self._early,
        )
        decode = config.decode
        drafter, reason = find_drafter(model, decode.drafter)
        self._batch = Batch(model, decode.slots, drafter=drafter, depth=decode.draft_tokens)
        log.info("drafter: %s (%s)", "none" if drafter is None else drafter.name, reason)
        self._drafting = reason
        self._loop = Loop()
        self._watches: dict[int, Watch] = {}
        self._pictures = Pictures(model, store)
        self._answers: dict[int, Answer] = {}
        self._sharing = Sharing(model, store, self.kept.saver, config.jobs.parked_seconds)
        self._words = words or Words(tokenizer, model.vocab_size, model.eos_ids)

    # --- the loop's side -----------------------------------------------------------------------

    def free(self) -> int:
        """Rows that can be added now."""
        return self._batch.slots - len(self._batch)

    def prepare(self, execution: Execution, job: Job) -> None:
        """See scheduler.decode_loop.Preparing: a large schema would hold up every row. Raises
        JobError for one that cannot be followed."""
        if (asked := grammar_asked(job)) is not None:
            try:
                with execution.notes.stage("grammar"), charge(execution.notes.meter):
                    self._words().matcher(asked["kind"], asked["text"])
            except ModelError as error:
                raise JobError(str(error)) from error

    def add(self, execution: Execution, job: Job) -> None:
        """Find the job's state and start its row. Raises SendBack, JobError."""
        notes = execution.notes
        emitted = execution.replay.ids
        began = time.monotonic()
        with charge(notes.meter):
            start = self._starts.find(job, emitted)
        told = {"tokens": len(start.ids), **({"early": start.early} if start.early else {})}
        # No state was sent, so that none was unpacked.
        here = start.path == "cold" and not start.ids and job.handoff is None
        notes.add("begin" if here else _STAGES[start.path], began, time.monotonic(), **told)
        notes.facts["store_read"] = start.read
        why = start.notes or [COMPUTED_HERE] * here
        notes.fork("state", start.path, "; ".join(why))
        notes.fork("kernels", *kernels(self._model.device))
        began = time.monotonic()
        try:
            params = sampling(job, self._model.eos_ids, self._config.decode.max_output_tokens)
            reader = Reader(job, self._tokenizer, params.stop)
            held, ids = len(start.ids), [*job.prompt_ids, *emitted]
            seen = self._pictures.seen(job, held, start.rope_delta)
            said = max(0, held - job.prompt_tokens + 1)  # of the answer, with the pending token
            row = Row(
                caches=start.caches,
                ids=start.ids,
                pending=ids[held : max(job.prompt_tokens, held + 1)],
                params=params,
                emitted=emitted[said:],
                said=emitted[:said],
                schedule=start.schedule,
                rope_delta=start.rope_delta,
                text=reader.stream(),
                lengths=start.lengths,
                embedded=seen,
                grammar=self._grammar(job, reader, execution),
                cuts=start.cuts,
                reached=partial(self._sharing.computed, job, (held, *start.cuts)),
            )
            uid = self._batch.add(row)
            start.after = start.rope_delta if seen is None else seen.rope_delta
        except (ModelError, ValueError) as error:
            self._starts.give_back(start)
            raise JobError(str(error)) from error
        self._answers[uid] = Answer(
            execution, job, start, reader, self._tokenizer, self._model.eos_ids
        )
        notes.add("set up", began, time.monotonic())
        self._watches[uid] = Watch(notes, self._loop)
        if start.held is not None:  # it is this row's now
            self.kept.taken(start.held, job.id)
        self._sharing.begins(job)
        if start.base is not None:
            self._sharing.loose.used(job.id, start.base)
        if start.shared:
            self._sharing.arrived(job, start.shared, start.lent)
            start.shared = []
        log.info("job %s: %s, %d tokens held", job.id, start.path, len(start.ids))

    def step(self) -> list[Finished]:
        """One step of all rows; what ended is handed back to the loop."""
        finished: list[Finished] = []
        began, chunk = time.monotonic(), 0.0
        with self._working():
            events = self._batch.step()
        stepped = time.monotonic()
        if self._batch.extended is not None:
            uid, tokens, since, until = self._batch.extended
            chunk = until - since
            if uid in self._watches:
                self._watches[uid].chunk(tokens, since, until)
        ended: list[Watch] = []
        for event in events:
            answer = self._answers[event.uid]
            if event.token is not None:
                self._watches[event.uid].token(stepped)
            answer.say(event)
            if event.finish is not None:
                del self._answers[event.uid]
                ended.append(self._watches.pop(event.uid))
                note_forks(answer.execution.notes, self._batch.facts, self._drafting, event)
                finished.append(self._finish(answer, event))
        told = time.monotonic()
        # It gives way first: what conversations give way to has to be written.
        self._early.look_after(self.free(), busy=True)
        self._sharing.look_after()
        self.kept.look_after()
        now = time.monotonic()
        self._loop.step(began, stepped, told, chunk, now)
        for watch in ended:
            watch.end(now)
        return finished

    def cancel(self, execution: Execution) -> None:
        """Drop a row and what has arrived for it."""
        for uid, answer in list(self._answers.items()):
            if answer.execution is execution:
                self._give_up(execution.job.id, self._batch.cancel(uid))
                del self._answers[uid]
                self._watches.pop(uid).end()
        self._inbox.discard(execution.job.id)

    def leave(self, execution: Execution, heir: str) -> Tail | None:
        """See scheduler.leaving: copy the row's state out and take the row from the batch."""
        found = [uid for uid, answer in self._answers.items() if answer.execution is execution]
        if not found or self._mover is None:
            return None
        answer = self._answers[found[0]]
        start, job = answer.start, answer.job
        if start.rope_delta != start.after and not answer.under_way:
            return None  # between images: the state does not say where its positions stand
        self._watches.pop(found[0]).end()
        del self._answers[found[0]]
        with execution.notes.stage("pack"):
            event = self._batch.cancel(found[0])
            pieces = state_of(self._model, event, start)
        self._give_up(job.id, event)
        self._inbox.discard(job.id)
        send, tokens = self._mover.send, len(answer.ids)
        return lambda: {"at_token": tokens, **send(job, heir, pieces)}

    def _running(self, turn: str) -> Caches | None:
        """The caches of an answer under way."""
        for uid, answer in self._answers.items():
            if answer.job.id == turn:
                return self._batch.caches(uid)
        return None

    def idle(self) -> bool:
        """Unpack what arrives and save what is idle; True while there is more to do at once."""
        more = self._early.look_after(self.free(), busy=False)
        self._sharing.look_after()
        return self.kept.look_after() or more

    def settle(self) -> None:
        """Bring what is told of ended turns into the store. May be called from any thread."""
        self._ledgers.write(self._ledgers.waiting())

    def forget(self, turns: Iterable[str]) -> None:
        """Drop the states of deleted turns soon. May be called from any thread."""
        self.kept.forget(turns)

    def drain(self) -> None:
        """Save every conversation that is still in memory, and wait until it is written."""
        self._sharing.look_after(wait=True)
        self.kept.drain()

    def budget(self) -> tuple[int, int, float]:
        """Bytes for state that waits here, of an empty state, and per token. Any thread.

        Prefills are begun only for what fits; idle conversations give way, so they do not count.
        """
        layout, span = self._model.layout, 4096
        fixed = layout.state_bytes(0)
        return self._memory.limit, fixed, (layout.state_bytes(span) - fixed) / span

    def facts(self) -> dict[str, Any]:
        """What this node says of itself."""
        return {
            "rows": len(self._answers),
            "slots": self._batch.slots,
            "hot": len(self.kept.hot),
            "behind": len(self.kept.behind),
            "memory_used": self._memory.used,
            "memory_limit": self._memory.limit,
            "device": self._model.device.kind,
            "pulses": 0 if self._pulse is None else self._pulse.pulses,
            "decode": self._batch.facts,
            "trouble": str(self.kept.hardship),
        }

    # --- the end of an answer -----------------------------------------------------------------

    def _finish(self, answer: Answer, event: Event) -> Finished:
        if event.finish == "error":
            self._give_up(answer.job.id, event)
            return Finished(answer.execution, error=ModelError(event.error))
        status = "completed" if event.finish == "stop" else "incomplete"
        closing = answer.closing(status)
        result = Result(
            status="completed" if event.finish == "stop" else "incomplete",
            reason="" if event.finish == "stop" else str(event.finish),
            output=answer.output(str(event.finish)),
            usage=answer.usage(),
            path={**answer.facts(event), "way": self._batch.way},
            events=closing,
            computed_tokens=answer.computed(event),
        )
        commit = None
        if answer.job.request.get("store", True):
            self._keep(answer, event)
            commit = partial(self._commit, answer, event, status)
        else:
            self._give_up(answer.job.id, event)
        noted = self._ledgers.ended if commit is not None else None
        return Finished(answer.execution, result, commit=commit, noted=noted)

    def _grammar(self, job: Job, reader: Reader, execution: Execution) -> Grammar | None:
        with charge(execution.notes.meter):
            return grammar(job, reader, self._words)

    def _keep(self, answer: Answer, event: Event) -> None:
        assert event.caches is not None
        start = answer.start
        self.kept.put(
            Held(
                turn=answer.job.id,
                caches=event.caches,
                ids=event.ids,
                pending=event.pending,
                schedule=event.schedule,
                rope_delta=start.after,
                nbytes=nbytes_of(event.caches),
                stored=start.stored,
                base=start.base,
            ),
            answer.execution,
        )

    def _commit(self, answer: Answer, event: Event, status: str) -> dict[str, Any] | None:
        """Make the turn durable, on a background thread; on a full disk it is answered only."""
        try:
            turn = compose(
                answer.job,
                self._store,
                fingerprint=self._model.fingerprint,
                output=answer.items,
                output_ids=answer.ids,
                schedule=event.schedule,
                usage=answer.usage(),
                status=status,
                finish=str(event.finish),
            )
            record(self._store, answer.job, turn)
        except StoreFull as error:
            self._not_recorded(answer)
            self.kept.hardship.note(error)
            log.error("%s is answered and not recorded: %s", answer.job.id, error)
            return {"recorded": False}
        except BaseException:
            self._not_recorded(answer)
            raise
        self.kept.recorded(turn.id)
        self._sharing.ended(turn.id, kept=True)
        return None

    def _not_recorded(self, answer: Answer) -> None:
        self.kept.forget([answer.job.id])
        self._sharing.ended(answer.job.id, kept=False)

    def _give_up(self, turn: str, event: Event) -> None:
        """A turn is not kept."""
        self.kept.give_up(turn, event)
        self._sharing.ended(turn, kept=False)


__all__ = ["Engine", "SendBack"]
