"""The output and error files of a batch, made from its journal."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.api.batch_journal import Journal
from scheduler.batches import Batch
from scheduler.files import Files
from scheduler.record import response_id


@dataclass(slots=True)
class Made:
    """Ids of the files, None where there was nothing to write; tokens of all that succeeded."""

    output: str | None = None
    errors: str | None = None
    usage: dict[str, int] = field(
        default_factory=lambda: {"input": 0, "cached": 0, "output": 0, "reasoning": 0}
    )


def write_files(files: Files, batch: Batch, journal: Journal, folder: Path) -> Made:
    """Write both files, in the order of the input. Done twice, it gives the same two files.

    `folder`: where they may be put together. Raises OSError.
    """
    made = Made()
    made.output = _write(files, batch, journal, folder, True, made.usage)
    made.errors = _write(files, batch, journal, folder, False, made.usage)
    return made


def _write(
    files: Files, batch: Batch, journal: Journal, folder: Path, ok: bool, usage: dict[str, int]
) -> str | None:
    if not (journal.completed if ok else journal.failed):
        return None
    kind = "output" if ok else "error"
    # Always the same id, so that a crash while it is written leads to one file, not to two.
    ident = "file-" + response_id(batch.id, kind).removeprefix("resp_")
    with tempfile.TemporaryFile(dir=folder) as made:
        for entry in journal.answers(ok):
            made.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            if ok:
                _add(usage, entry["response"]["body"].get("usage") or {})
        made.seek(0)
        files.put(
            made,
            owner=batch.owner,
            name=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            seconds=batch.keep,
            ident=ident,
            limited=False,
        )
    return ident


def _add(usage: dict[str, int], told: dict[str, Any]) -> None:
    """Add a response's usage, in either API's names."""
    usage["input"] += told.get("input_tokens", told.get("prompt_tokens", 0))
    usage["output"] += told.get("output_tokens", told.get("completion_tokens", 0))
    inner = told.get("input_tokens_details") or told.get("prompt_tokens_details") or {}
    usage["cached"] += inner.get("cached_tokens", 0)
    outer = told.get("output_tokens_details") or told.get("completion_tokens_details") or {}
    usage["reasoning"] += outer.get("reasoning_tokens", 0)
