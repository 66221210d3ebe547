"""How a job looks from outside: OpenAI's response object, its events, and Tandem's own facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.api.caller import is_owned
from scheduler.api.items import answer, message_id, output_items, text_part
from scheduler.api.tools import for_client
from scheduler.prompt_facts import prompt_facts
from scheduler.record import Forecast, Job, Status

WIRE_STATUS: dict[Status, str] = {
    "queued": "queued",
    "prefilling": "in_progress",
    "handing_off": "in_progress",
    "decoding": "in_progress",
    "completed": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "cancelled": "cancelled",
}
_OPENING = {
    "response.created": "queued",
    "response.queued": "queued",
    "response.in_progress": "in_progress",
}
_REASONS = {"length": "max_output_tokens"}
_TIERS = {"interactive": "priority", "normal": "default", "batch": "flex"}


def response_object(job: Job, forecast: Forecast | None = None) -> dict[str, Any]:
    """The whole response as it is now; `forecast`: its place in its queue while it waits."""
    body = _body(job, WIRE_STATUS[job.status])
    if job.ended:
        body["output"] = output_items(job.id, job.output, job.status)
        body["usage"] = usage(job)
        body["completed_at"] = int(job.times.get(job.status, job.created_at))
    if job.status == "failed":
        error = job.error or {}
        body["error"] = {
            "code": error.get("code") or "server_error",
            "message": error.get("message") or "the run failed",
        }
    if job.status == "incomplete":
        body["incomplete_details"] = {"reason": _REASONS.get(job.reason, job.reason or "unknown")}
    body["tandem"] = facts(job, forecast)
    return body


def _body(job: Job, status: str) -> dict[str, Any]:
    """What of a response does not change while it runs."""
    request = job.request
    params: Mapping[str, Any] = request.get("params") or {}
    about: Mapping[str, Any] = params.get("about") or {}
    return {
        "id": job.id,
        "object": "response",
        "created_at": int(job.created_at),
        "completed_at": None,
        "status": status,
        "background": job.background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": params.get("max_output_tokens"),
        "model": job.model,
        "output": [],
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "previous_response_id": job.previous if about.get("by_response") else None,
        "conversation": {"id": job.conversation} if job.conversation else None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": _TIERS[job.priority],
        "store": request.get("store", True),
        "temperature": params.get("temperature"),
        "text": {"format": params.get("format") or {"type": "text"}},
        "tool_choice": params.get("tool_choice", "auto"),
        "tools": for_client(request.get("tools") or (), params.get("strict") or ()),
        "top_logprobs": max(0, params.get("top_logprobs") or 0),
        "top_p": params.get("top_p"),
        "truncation": params.get("truncation", "disabled"),
        "usage": None,
        "user": about.get("user") or (None if is_owned(job.owner) else job.owner) or None,
        "metadata": about.get("metadata") or {},
    }


def usage(job: Job) -> dict[str, Any] | None:
    """Token counts. `cached_tokens`: prompt tokens that skipped the model; None where unknown."""
    told = job.usage
    if told is None:
        return None
    prompt = int(told.get("input_tokens", job.prompt_tokens))
    written = int(told.get("output_tokens", 0))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": _cached(job, prompt), "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": int(told.get("reasoning_tokens", 0))},
        "total_tokens": prompt + written,
    }


def _cached(job: Job, prompt: int) -> int:
    told = job.usage or {}
    cached = told.get("cached_tokens")
    if cached is None:
        cached = job.path.get("cached_tokens", 0)
    return max(0, min(int(cached), prompt))


def facts(job: Job, forecast: Forecast | None = None) -> dict[str, Any]:
    """Tandem's own facts about a response: where it is, what it cost, which way it took.

    `new_tokens`: prompt tokens that no held state covered; `computed_tokens`: prompt tokens that
    went through the model, None where that is not known (before the end, or stopped). Times are
    seconds since the job was accepted.
    """
    path = {k: v for k, v in job.path.items() if k not in ("path", "cached_tokens")}
    path |= prompt_facts(job.request)
    about = (job.request.get("params") or {}).get("about") or {}
    prefilled = job.prefilled_tokens
    started = job.created_at
    times: dict[str, float] = {name: round(at - started, 6) for name, at in job.times.items()}
    if job.first_token_at is not None:
        times["first_token"] = round(job.first_token_at - started, 6)
    cached = job.held_tokens if job.usage is None else _cached(job, job.prompt_tokens)
    return {
        "stage": job.status,
        "queue": job.queue,
        "queue_position": forecast.place if forecast else None,
        "predicted_start_s": round(forecast.start, 1) if forecast else None,
        "node": job.node,
        "session": about.get("session"),
        "path": job.path.get("path"),
        "prefill": {"done": prefilled, "total": job.prompt_tokens},
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": cached,
        "new_tokens": job.prompt_tokens - cached,
        "computed_tokens": job.computed_tokens or None,
        **({"route": job.route} if job.route else {}),
        "handoff": job.handoff,
        "times": times,
        "attempts": job.attempts_by_stage,
        **({"details": path} if path else {}),
    }


def replayed(job: Job) -> list[dict[str, Any]]:
    """Events that tell an ended job whose own log has expired, in as few steps as can be."""
    events: list[dict[str, Any]] = [{"type": "response.created"}, {"type": "response.in_progress"}]
    for index, item in enumerate(output_items(job.id, job.output, job.status)):
        at: dict[str, Any] = {"output_index": index}
        began = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {})
        events.append({"type": "response.output_item.added", "item": began, **at})
        if item.get("type") == "message":
            for number, part in enumerate(item["content"]):
                at.update(content_index=number, item_id=item["id"])
                text, odds = part.get("text", ""), {"logprobs": part.get("logprobs") or []}
                events += [
                    {"type": "response.content_part.added", **at},
                    {"type": "response.output_text.delta", "delta": text, **odds, **at},
                    {"type": "response.output_text.done", "text": text, **odds, **at},
                    {"type": "response.content_part.done", "part": part, **at},
                ]
        elif item.get("type") == "function_call":
            at["item_id"] = item["id"]
            told, name = item["arguments"], "response.function_call_arguments"
            events[-1]["item"]["arguments"] = ""
            events.append({"type": f"{name}.delta", "delta": told, **at})
            events.append({"type": f"{name}.done", "arguments": told, "name": item["name"], **at})
        elif item.get("type") == "reasoning":
            for number, part in enumerate(item.get("content") or ()):
                at.update(content_index=number, item_id=item["id"])
                name, empty = "response.reasoning_text", {**part, "text": ""}
                events += [
                    {"type": "response.content_part.added", "part": empty, **at},
                    {"type": f"{name}.delta", "delta": part["text"], **at},
                    {"type": f"{name}.done", "text": part["text"], **at},
                    {"type": "response.content_part.done", "part": part, **at},
                ]
        done = {"type": "response.output_item.done", "item": item, "output_index": index}
        events.append(done)
    end = "completed" if job.status == "completed" else "failed"
    end = "incomplete" if job.status in ("incomplete", "cancelled") else end
    return [*events, {"type": f"response.{end}"}]


class EventView:
    """Turns a job's logged events into OpenAI's, in order from the first.

    What an event says never depends on when it is read, so a replay repeats it exactly; only the
    terminal one, which carries the whole response, needs the job as it ended.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._text: list[str] = []

    def render(self, seq: int, data: Mapping[str, Any], ended: Job | None = None) -> dict[str, Any]:
        """The event numbered `seq`. `ended`: the job after its end, for a terminal event."""
        kind = str(data["type"])
        out: dict[str, Any] = {"type": kind, "sequence_number": seq}
        if kind in _OPENING:
            out["response"] = _body(self._job, _OPENING[kind])
        elif ended is not None:
            out["response"] = response_object(ended)
        elif kind == "response.output_text.delta":
            self.hear(text := str(data.get("delta", "")))
            out.update(self._at(data), delta=text, logprobs=data.get("logprobs") or [])
        elif kind == "response.output_text.done":
            out.update(self._at(data), text=self._said(data), logprobs=data.get("logprobs") or [])
        elif kind == "response.content_part.added":
            out.update(self._at(data), part=data.get("part") or text_part(""))
        elif kind == "response.content_part.done":
            out.update(self._at(data), part=data.get("part") or text_part(self._said(data)))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            done = kind.endswith("done")
            item = data.get("item")
            # A bare hint ("there is a message") is filled in; a whole item is passed on.
            if not item or "id" not in item:
                status = str((item or data).get("status") or "completed") if done else "in_progress"
                item = answer(self._job.id, self._said(data), status)
            out.update(output_index=data.get("output_index", 0), item=item)
        else:
            out.update({k: v for k, v in data.items() if k not in ("type", "ids")})
        return out

    def hear(self, text: str) -> None:
        """Remember a piece of the answer that is rendered elsewhere."""
        self._text.append(text)

    def _said(self, data: Mapping[str, Any]) -> str:
        text = data.get("text")
        return str(text) if text is not None else "".join(self._text)

    def _at(self, data: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "item_id": data.get("item_id") or message_id(self._job.id),
            "output_index": data.get("output_index", 0),
            "content_index": data.get("content_index", 0),
        }
