"""One batch on its way: a bounded window of its lines is submitted, ended ones are written down."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from redis.exceptions import RedisError

from scheduler.api.backend import Backend
from scheduler.api.batch_journal import Journal
from scheduler.api.batch_lines import (
    MAX_LINES,
    Entry,
    Line,
    LineError,
    Lines,
    answered,
    raw_lines,
    refused,
    request_of,
    unserved,
)
from scheduler.api.batch_output import write_files
from scheduler.api.caller import Caller, acting, caller_of, is_owned
from scheduler.api.faults import Fault
from scheduler.api.intake import accept, owner_of
from scheduler.api.lookup import find_job
from scheduler.batches import Batch, Status, is_sent
from scheduler.files import FilesError
from scheduler.record import TERMINAL, JobError, JobNotFound, response_id

log = logging.getLogger("tandem.batches")

AT_A_TIME = 8
"""Lines submitted before other batches have their turn."""
BACK_OFF = 1.0
"""Seconds without a submission after the queue was full or a part was away."""
CANCEL_SECONDS = 600.0
"""How long cancelled lines may take to end before they count as ended."""
_PASSING = (429, 503)
_BUSY = frozenset(("conversation_busy", "response_in_progress"))
_ENDS: dict[str, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


@dataclass(slots=True)
class _Sent:
    line: Line
    response: str


class BatchRun:
    """Advances one batch by steps; made anew after a restart, it goes on where it was."""

    def __init__(self, backend: Backend, batch: Batch, folder: Path) -> None:
        """Reads the journal. Raises FilesError where the input is gone."""
        self._backend = backend
        self.batch = batch
        self._limit = backend.config.api.max_body_mb << 20
        file = backend.files.get(batch.input_file, expired=True)
        if file is None:
            raise FilesError(f"the input file {batch.input_file} is gone: upload it again")
        self._source = backend.files.open(file)
        self.path = folder / batch.id
        self._journal = Journal(self.path)
        self._bitmap = backend.batches.sent(batch)
        self._lines = Lines(batch.endpoint, self._limit, backend.config.api.max_values)
        self._raw: Iterator[tuple[int, bytes]] | None = raw_lines(self._source, self._limit)
        self._sent: dict[int, _Sent] = {}
        self._later: list[Line] = []
        self._not_before = 0.0
        self._told = (-1, -1)

    def close(self) -> None:
        """Close the files; the batch goes on when it is taken up again."""
        self._source.close()
        self._journal.__exit__(None, None, None)

    def step(self) -> bool:
        """Do what can be done now; whether anything was. The batch may have ended: see `batch`.

        After an error the run must be made anew: the journal knows which lines are done, and the
        jobs of the others are found by their ids.
        """
        batch = self.batch = self._backend.batches.get(self.batch.id) or self.batch
        if batch.status == "validating":
            return self._validate()
        if batch.status == "finalizing":
            return self._finish(batch.ending or "completed")
        with acting(self._caller()):
            moved = self._collect()
            if ending := self._ending():
                return self._stop(ending) or moved
            moved = self._submit() or moved
        self._tell()
        if self._raw is None and not self._later and not self._sent:
            self.batch = self._backend.batches.move(batch, "finalizing", ending="completed")
            moved = True
        return moved

    def _caller(self) -> Caller:
        owner = self._backend.owners.by_key(self.batch.owner)
        if owner is not None:
            return caller_of(owner, "batch")
        # An owner whose tokens were taken away sees no more than before.
        scoped = is_owned(self.batch.owner)
        return Caller(owner=self.batch.owner, scoped=scoped, operator=False, address="batch")

    def _validate(self) -> bool:
        total = 0
        for _ in raw_lines(self._source, self._limit):
            total += 1
            if total > MAX_LINES:
                break
        self._source.seek(0)
        why: tuple[str, str] | None = None
        if not total:
            why = ("empty_file", "the input file has no lines: write one request on each")
        elif total > MAX_LINES:
            why = ("too_many_requests", f"a batch has at most {MAX_LINES} lines: make several")
        if why:
            error = {"code": why[0], "message": why[1], "line": None, "param": None}
            self.batch = self._backend.batches.move(self.batch, "failed", errors=[error])
        else:
            model = self._backend.config.model_name
            self.batch = self._backend.batches.move(
                self.batch, "in_progress", total=total, model=model
            )
        return True

    # ------------------------------------------------------------------ submitting

    def _submit(self) -> bool:
        """Send lines while the window has room; True where any line was dealt with."""
        if time.monotonic() < self._not_before:
            return False
        window = self._backend.config.api.batch_lines
        waiting, self._later = self._later, []
        done = 0
        for place, line in enumerate(waiting):
            if not self._send(line):
                self._later += waiting[place + 1 :]
                return done > 0
            done += 1
        while self._raw is not None and done < AT_A_TIME:
            if len(self._sent) + len(self._later) >= window:
                break
            found = next(self._raw, None)
            if found is None:
                self._raw = None
                break
            number, raw = found
            try:
                line = self._lines.read(number, raw)
            except LineError as error:
                if number not in self._journal:
                    entry = unserved(self.batch, number, error.custom_id, error.code, str(error))
                    self._journal.add(number, False, entry)
                    done += 1
                continue
            if number in self._journal:
                continue
            done += 1
            if not self._send(line):
                break
        return done > 0

    def _send(self, line: Line) -> bool:
        """Submit one line, or find it submitted; False where nothing can be submitted now."""
        batch, number = self.batch, line.number
        try:
            body, about = request_of(batch, line.body)
            key = f"{batch.id}:{number}"
            response = response_id(owner_of(body), key)
            try:
                self._backend.jobs.get(response)
            except JobNotFound:
                if is_sent(self._bitmap, number):
                    self._write(
                        line,
                        unserved(
                            batch, number, line.custom_id, "result_lost",
                            "This request was executed, and its answer has expired or was deleted "
                            "before it was written down.",
                        ),
                    )  # fmt: skip
                    return True
                accept(self._backend, body, key, about)
            self._backend.batches.mark_sent(batch, number)
        except Fault as fault:
            if fault.status in _PASSING or fault.code in _BUSY:
                self._later.append(line)
                self._not_before = time.monotonic() + (fault.after or BACK_OFF) * 0.5
                return fault.code in _BUSY
            self._write(line, refused(batch, number, line.custom_id, fault))
            return True
        except (JobError, ValidationError) as error:
            text = str(error).splitlines()[0]
            self._write(line, refused(batch, number, line.custom_id, Fault(400, text)))
            return True
        except (RedisError, OSError):
            raise
        except Exception:
            # One line that meets a fault of ours must not hold up the others.
            log.exception("line %d of %s cannot be submitted", number, batch.id)
            ours = Fault(
                500, "internal error; the API's log has the details", code="internal_error"
            )
            self._write(line, refused(batch, number, line.custom_id, ours))
            return True
        self._sent[number] = _Sent(line, response)
        return True

    # ------------------------------------------------------------------ collecting

    def _collect(self) -> bool:
        """Write down what has ended; True where anything has."""
        if not self._sent:
            return False
        pipe = self._backend.redis.pipeline(transaction=False)
        for sent in self._sent.values():
            pipe.hget(f"tandem:job:{sent.response}", "status")
        states = pipe.execute()
        ended = [
            sent
            for sent, status in zip(list(self._sent.values()), states, strict=True)
            if status is None or status.decode() in TERMINAL
        ]
        for sent in ended:
            self._settle(sent)
        return bool(ended)

    def _settle(self, sent: _Sent) -> None:
        batch, line = self.batch, sent.line
        del self._sent[line.number]
        try:
            job = find_job(self._backend, sent.response)
        except Fault as fault:
            if fault.status in _PASSING:
                self._sent[line.number] = sent
                return
            entry = unserved(
                batch, line.number, line.custom_id, "result_lost",
                "The answer to this request was deleted before it was written down.",
            )  # fmt: skip
            self._write(line, entry)
            return
        if job.status == "cancelled":
            code, message = _ENDS[self._ending() or "cancelled"]
            if self._ending() is None:
                code, message = "request_cancelled", "This request was cancelled by itself."
            self._write(line, unserved(batch, line.number, line.custom_id, code, message))
            return
        ok, entry = answered(batch, line.number, line.custom_id, job)
        self._journal.add(line.number, ok, entry)
        self._backend.jobs.let_go(job)

    def _write(self, line: Line, entry: Entry) -> None:
        self._journal.add(line.number, False, entry)

    def _tell(self) -> None:
        counts = (self._journal.completed, self._journal.failed)
        if counts != self._told:
            self._backend.batches.count(self.batch, *counts)
            self._told = counts

    # ------------------------------------------------------------------ ending

    def _ending(self) -> Status | None:
        """How the batch ends early, if it does. A cancel counts before the window's end."""
        if self.batch.cancelling is not None:
            return "cancelled"
        return "expired" if time.time() >= self.batch.expires else None

    def _stop(self, ending: Status) -> bool:
        """Cancel what runs; when it has ended, write the other lines down as not executed."""
        for sent in self._sent.values():
            self._backend.jobs.cancel(sent.response)
        since = self.batch.cancelling if ending == "cancelled" else self.batch.expires
        if self._sent and time.time() < (since or 0.0) + CANCEL_SECONDS:
            self._tell()
            return False
        code, message = _ENDS[ending]
        for sent in [*self._sent.values()]:
            line = sent.line
            self._write(line, unserved(self.batch, line.number, line.custom_id, code, message))
        self._sent.clear()
        for line in self._later:
            self._write(line, unserved(self.batch, line.number, line.custom_id, code, message))
        self._later.clear()
        for number, raw in self._raw or ():
            try:
                custom: str | None = self._lines.read(number, raw).custom_id
                said = (code, message)
            except LineError as error:
                custom, said = error.custom_id, (error.code, str(error))
            if number not in self._journal:
                self._journal.add(number, False, unserved(self.batch, number, custom, *said))
        self._raw = None
        self._tell()
        self.batch = self._backend.batches.move(self.batch, "finalizing", ending=ending)
        return True

    def _finish(self, ending: Status) -> bool:
        """Make the output and error files and end the batch; may be done twice."""
        made = write_files(self._backend.files, self.batch, self._journal, self.path.parent)
        self.batch = self._backend.batches.move(
            self.batch,
            ending,
            output_file=made.output,
            error_file=made.errors,
            usage=made.usage,
            completed=self._journal.completed,
            failed=self._journal.failed,
        )
        log.info("%s is %s: %d lines, %d failed", self.batch.id, ending, len(self._journal),
                 self._journal.failed)  # fmt: skip
        return True
