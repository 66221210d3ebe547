"""One answer under way: from the engine's tokens to the events that a client sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.grammar import Grammar, Vocabulary
from engine.prefill import append_schedule, expand_schedule
from engine.rows import Event
from engine.sampling import SamplingParams
from scheduler.api.output import Output
from scheduler.execution import Execution
from scheduler.record import Job
from worker_decode.reader import Reader, logprobs_of
from worker_decode.starts import Start


class Answer:
    """The job of one row, what it has said so far, and where its state came from."""

    def __init__(
        self,
        execution: Execution,
        job: Job,
        start: Start,
        reader: Reader,
        tokenizer: Any,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Takes up what an earlier run has said, and says what of it the log has lost."""
        self.execution = execution
        self.job = job
        self.start = start
        self.held_before = len(start.ids)
        self.ids = list(execution.replay.ids)
        self._reader = reader
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._output = Output(job.id, plain=reader.plain)
        self._replay = execution.replay
        self._stream = reader.stream()
        self._output.recorded = list(execution.replay.logprobs)
        self._made = 0  # events of what an earlier run has said
        # Whether its last token ended the answer is told by the engine.
        for token in self.ids[:-1]:
            self._repeat(token)
        self._last: int | None = self.ids[-1] if self.ids else None

    def say(self, event: Event) -> None:
        """Send what one engine event adds. Every token id goes out, whether it has text or not."""
        ended = event.finish is not None
        if self._last is not None:
            self._repeat(self._last, end=ended and event.token is None)
            self._last = None
            self._output.recorded = []
        if event.token is not None:
            self.ids.append(event.token)
            pieces = self._reader.read(event.text, end=ended)
            logprobs = logprobs_of(event, self._tokenizer)
            self._emit(self._output.say(pieces, [event.token], logprobs))

    def _repeat(self, token: int, *, end: bool = False) -> None:
        """Make the events of a token that was said before; send those that the log has lost."""
        text = "" if token in self._stop_ids else self._stream.push(token)
        if end:
            text += self._stream.finish()
        events = self._output.say(self._reader.read(text, end=end), [token])
        known = max(0, self._replay.said - self._made)
        self._made += len(events)
        self._emit(events[known:])

    @property
    def under_way(self) -> bool:
        """Whether a token of the answer was said in this run: all of the prompt is computed."""
        return bool(self.ids) and self._last is None

    def closing(self, status: str) -> list[dict[str, Any]]:
        """The events that close the answer, for the terminal step."""
        return self._output.close(status)

    @property
    def text(self) -> str:
        """All text so far, without thinking and calls."""
        return self._output.text

    @property
    def items(self) -> list[dict[str, Any]]:
        """The output items; whole after `closing`."""
        return self._output.items()

    def output(self, finish: str) -> dict[str, Any]:
        """What the job's record keeps of the answer."""
        return self._output.result(finish)

    def _emit(self, events: list[dict[str, Any]]) -> None:
        if events:
            self.execution.emit(*events)

    def usage(self) -> dict[str, int]:
        """Token counts in OpenAI's names."""
        return {
            "input_tokens": self.job.prompt_tokens,
            "cached_tokens": self.start.cached,
            "output_tokens": len(self.ids),
            **({"reasoning_tokens": thought} if (thought := self._output.reasoning_tokens) else {}),
        }

    def computed(self, event: Event) -> int:
        """Prompt tokens that went through a model for this turn, counted from the forwards run.

        `event` is the row's last: its schedule lists every forward that built its state.
        """
        fed = sum(length * count for length, count in event.schedule) - self.held_before
        here = fed - (len(event.ids) - self.job.prompt_tokens)
        return here + self.held_before - self.start.cached

    def facts(self, event: Event) -> dict[str, Any]:
        """The path this answer took."""
        return {
            "path": self.start.path,
            "held_tokens": self.held_before,
            "chunks": self._chunks(event),
            "widths": {str(width): count for width, count in event.widths.items()},
            "blocks": {str(length): count for length, count in event.blocks.items()},
            **({"speculation": speculation_of(event)} if event.drafted else {}),
            **({"notes": self.start.notes} if self.start.notes else {}),
        }

    def _chunks(self, event: Event) -> list[list[int]]:
        """The forwards of prompt tokens that ran here, as [tokens, count]."""
        chunks: list[list[int]] = []
        at = 0
        for length in expand_schedule(event.schedule):
            if self.held_before <= at and at + length < self.job.prompt_tokens:
                append_schedule(chunks, length)
            at += length
        return chunks


def speculation_of(event: Event) -> dict[str, Any]:
    """How many tokens were proposed for a row, and how many of them were right."""
    return {
        "drafted": event.drafted,
        "accepted": event.accepted,
        "acceptance": round(event.accepted / event.drafted, 3),
    }


def sampling(job: Job, eos_ids: frozenset[int], default_tokens: int) -> SamplingParams:
    """The sampling that a request asks for. Raises ModelError for values out of range."""
    asked: Mapping[str, Any] = job.request.get("params") or {}
    stop = asked.get("stop") or ()
    return SamplingParams(
        temperature=float(asked.get("temperature") or 0.0),
        top_p=float(1.0 if asked.get("top_p") is None else asked["top_p"]),
        top_k=int(asked.get("top_k") or 0),
        min_p=float(asked.get("min_p") or 0.0),
        seed=int(asked.get("seed") or 0),
        max_tokens=int(asked.get("max_output_tokens") or default_tokens),
        stop_ids=eos_ids,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logit_bias={int(k): float(v) for k, v in (asked.get("logit_bias") or {}).items()},
        repetition_penalty=float(asked.get("repetition_penalty") or 1.0),
        presence_penalty=float(asked.get("presence_penalty") or 0.0),
        frequency_penalty=float(asked.get("frequency_penalty") or 0.0),
        top_logprobs=int(-1 if asked.get("top_logprobs") is None else asked["top_logprobs"]),
    )


def grammar_asked(job: Job) -> Mapping[str, Any] | None:
    """What a request says of the grammar that its answer is held to, if it names one."""
    return (job.request.get("params") or {}).get("grammar") or None


def grammar(job: Job, reader: Reader, vocabulary: Callable[[], Vocabulary]) -> Grammar | None:
    """The grammar that a request holds its answer to. Raises ModelError where it is none."""
    asked = grammar_asked(job)
    if asked is None:
        return None
    return Grammar(vocabulary(), asked["kind"], asked["text"], reader.thought())
