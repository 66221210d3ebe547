"""One answer under way: from the engine's tokens to the events that a client sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.decode import Event
from engine.sampling import SamplingParams
from scheduler.execution import Execution
from scheduler.record import Job
from worker_decode.starts import Start

ITEM_ADDED = "response.output_item.added"
PART_ADDED = "response.content_part.added"
DELTA = "response.output_text.delta"
TEXT_DONE = "response.output_text.done"
PART_DONE = "response.content_part.done"
ITEM_DONE = "response.output_item.done"


class Answer:
    """The job of one row, what it has said so far, and where its state came from."""

    def __init__(self, execution: Execution, job: Job, start: Start) -> None:
        self.execution = execution
        self.job = job
        self.start = start
        self.held_before = len(start.ids)
        self.ids = list(execution.replay.ids)
        self.text = execution.replay.text
        self._seen = set(execution.replay.types)

    def say(self, event: Event) -> None:
        """Send what one engine event adds. Every token id goes out, whether it has text or not."""
        if event.token is None and not event.text:
            return
        self._once(ITEM_ADDED)
        self._once(PART_ADDED)
        data: dict[str, Any] = {"type": DELTA, "delta": event.text, "ids": []}
        if event.token is not None:
            self.ids.append(event.token)
            data["ids"] = [event.token]
        self.text += event.text
        self.execution.emit(data)

    def closing(self, status: str) -> list[dict[str, Any]]:
        """The events that close the message, for the terminal step."""
        self._once(ITEM_ADDED)
        self._once(PART_ADDED)
        return [
            {"type": TEXT_DONE, "text": self.text},
            {"type": PART_DONE, "text": self.text},
            {"type": ITEM_DONE, "text": self.text, "status": status},
        ]

    def usage(self) -> dict[str, int]:
        """Token counts in OpenAI's names."""
        return {
            "input_tokens": self.job.prompt_tokens,
            "cached_tokens": self.start.cached,
            "output_tokens": len(self.ids),
        }

    def computed(self, event: Event) -> int:
        """Prompt tokens that went through a model for this turn, counted from the forwards run.

        `event` is the row's last: its schedule lists every forward that built its state.
        """
        fed = sum(length * count for length, count in event.schedule) - self.held_before
        here = fed - (len(event.ids) - self.job.prompt_tokens)
        return here + (self.held_before if self.start.path == "cold" else 0)

    def facts(self, event: Event) -> dict[str, Any]:
        """The path this answer took."""
        return {
            "path": self.start.path,
            "held_tokens": self.held_before,
            "widths": {str(width): count for width, count in event.widths.items()},
            **({"notes": self.start.notes} if self.start.notes else {}),
        }

    def _once(self, kind: str) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            self.execution.emit({"type": kind})


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
    )
