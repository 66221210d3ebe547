"""Routes of /v1/files: what batches read and write."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import Response, StreamingResponse

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.lookup import Order
from scheduler.files import KEEP_SECONDS, File, FilesError, FilesFull

FileId = Annotated[str, Path(max_length=256)]
_NAME = 255
_CHUNK = 256 << 10
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


def router(backend: Backend) -> APIRouter:
    """The routes, working with `backend`."""
    routes = APIRouter(prefix="/v1/files", tags=["files"])

    @routes.post("", openapi_extra=_FORM)
    async def upload_file(request: Request) -> dict[str, Any]:
        try:
            form = await request.form(max_files=1, max_fields=16)
        except (MultiPartException, HTTPException) as error:
            why = getattr(error, "message", None) or getattr(error, "detail", "")
            raise bad(f"the body is no multipart form with one file: {why}") from error
        try:
            return await run_in_threadpool(_keep, backend, form)
        finally:
            await form.close()

    @routes.get("")
    def list_files(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Order = "desc",
        after: str | None = None,
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> dict[str, Any]:
        caller = current()
        every = backend.files.newest(caller.owner if caller.scoped else None)
        found = [file for file in every if purpose in (None, file.purpose)]
        if order == "asc":
            found.reverse()
        if after is not None:
            names = [file.id for file in found]
            if after not in names:
                raise bad(f"there is no file '{after[:80]}' here to begin after", "after")
            found = found[names.index(after) + 1 :]
        data = [file_object(file) for file in found[:limit]]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }

    @routes.get("/{file_id}")
    def retrieve_file(file_id: FileId) -> dict[str, Any]:
        return file_object(find_file(backend, file_id))

    @routes.get("/{file_id}/content", response_class=Response)
    def file_content(file_id: FileId) -> Response:
        file = find_file(backend, file_id)
        try:
            contents = backend.files.open(file)
        except FilesError as error:
            raise Fault(404, str(error), code="file_not_found", param="file_id") from error
        # As text that no browser takes for a page.
        headers = {"content-length": str(file.size), "x-content-type-options": "nosniff"}
        headers["content-disposition"] = "attachment"
        chunks = iter(lambda: contents.read(_CHUNK), b"")
        closing = itertools.chain(chunks, (contents.close() or b"" for _ in (None,)))
        return StreamingResponse(closing, media_type="application/octet-stream", headers=headers)

    @routes.delete("/{file_id}")
    def delete_file(file_id: FileId) -> dict[str, Any]:
        file = find_file(backend, file_id)
        for batch in backend.batches.unfinished(backend.config.node):
            if batch.input_file == file.id:
                raise Fault(
                    409,
                    f"{batch.id} reads this file: cancel it, or wait for its end",
                    code="file_in_use",
                    retry=False,
                )
        backend.files.delete(file)
        backend.note("delete", file.id)
        return {"id": file.id, "object": "file", "deleted": True}

    return routes


def find_file(backend: Backend, ident: str, param: str = "file_id") -> File:
    """A file that the caller may see. Fault 404."""
    file = backend.files.get(ident)
    if file is None or not current().may_see(file.owner):
        raise missing("File", ident[:80], param)
    return file


def file_object(file: File) -> dict[str, Any]:
    """A file as OpenAI's clients know it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def full(error: FilesFull) -> Fault:
    """429 for a store that is full: waiting alone does not help."""
    return Fault(429, str(error), code="storage_quota_exceeded", retry=False, after=60)


def _keep(backend: Backend, form: FormData) -> dict[str, Any]:
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise bad("the form has no file: send one in the field 'file'", "file")
    if purpose != "batch":
        raise bad("files are taken for batches only: send purpose 'batch'", "purpose")
    caller = current()
    try:
        file = backend.files.put(
            upload.file,
            owner=caller.owner,
            name=_plain(upload.filename or "batch.jsonl"),
            purpose="batch",
            seconds=_seconds(form),
            owner_bytes=caller.stored_bytes,
        )
    except FilesFull as error:
        raise full(error) from error
    backend.note("upload", file.id, bytes=file.size)
    return file_object(file)


def _seconds(form: FormData) -> float:
    """How long the file is wanted: `expires_after` in the form's bracketed names."""
    anchor: Any = form.get("expires_after[anchor]")
    given: Any = form.get("expires_after[seconds]")
    if anchor is None and given is None:
        return KEEP_SECONDS
    if anchor != "created_at":
        raise bad("expires_after.anchor must be 'created_at'", "expires_after")
    return check_seconds(given)


def check_seconds(given: Any) -> float:
    """`expires_after.seconds` within OpenAI's limits. Raises Fault 400."""
    try:
        seconds = int(given)
    except (TypeError, ValueError):
        seconds = 0
    if not 3600 <= seconds <= 2_592_000:
        raise bad("expires_after.seconds must be from 3600 to 2592000", "expires_after")
    return float(seconds)


def _plain(name: str) -> str:
    """A file's name as it is shown: no folder, nothing that cannot be printed."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable())
    return shown.encode("utf-8", "replace").decode()[:_NAME] or "batch.jsonl"
