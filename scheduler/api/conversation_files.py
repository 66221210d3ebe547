"""Conversations as wholes: fork one, take one out into a file with its state, and put one in."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Path, Request
from pydantic import field_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from scheduler.api.backend import Backend
from scheduler.api.caller import current
from scheduler.api.faults import Fault, bad, missing
from scheduler.api.lineage import divided
from scheduler.api.lookup import find_conversation
from scheduler.api.schema import Metadata, Name, Shape, check_metadata
from store.errors import StoreError
from store.rpc import StoreClient

ConversationId = Annotated[str, Path(max_length=256)]
LONG = 600.0
"""Seconds that the store may take to write or to check a file."""
_CHUNK = 1 << 20
Shown = Callable[[dict[str, Any]], dict[str, Any]]
_BUNDLE: dict[str, Any] = {
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
}
_INSIDE = re.compile(r"^(bad request|the owner failed)")


class Fork(Shape):
    """Body of POST /v1/conversations/{id}/fork."""

    response_id: Name | None = None
    metadata: Metadata | None = None

    _check_metadata = field_validator("metadata")(check_metadata)


def add_to(routes: APIRouter, backend: Backend, shown: Shown) -> None:
    """Add the routes; `shown` makes a conversation's object of its record."""
    _clean(backend)

    @routes.post("/import", openapi_extra={"requestBody": {"required": True, **_BUNDLE}})
    async def import_conversation(request: Request) -> dict[str, Any]:
        """An extension: store a conversation from a file that an export gave.

        It keeps its ids, or gets new ones where they are taken: by another owner, or by this one
        for something else. `imported.renamed` has the new ids by the old ones.
        """
        directory = _directory(backend)
        fd, name = await run_in_threadpool(tempfile.mkstemp, dir=directory)
        path = FilePath(name)
        try:
            with os.fdopen(fd, "wb") as file:
                async for chunk in request.stream():
                    await run_in_threadpool(file.write, chunk)
            owner = current().owner if current().scoped else None
            done = await run_in_threadpool(_ask, backend, "import", path, owner=owner)
        finally:
            path.unlink(missing_ok=True)
        ident = done.pop("conversation")
        await run_in_threadpool(_revive, backend, ident)
        backend.note("import", ident)
        record = await run_in_threadpool(find_conversation, backend, ident)
        return shown(record) | {"imported": done}

    @routes.get(
        "/{conversation_id}/export",
        response_class=Response,
        responses={200: {"description": "the file", **_BUNDLE}},
    )
    def export_conversation(conversation_id: ConversationId) -> Response:
        """An extension: the conversation with its turns, token ids and stored states, as a file."""
        record = find_conversation(backend, conversation_id)
        limit = backend.config.api.max_bundle_mb << 20
        if record["bytes"] > limit:
            raise Fault(
                413,
                f"its state has {record['bytes']:,} bytes and {limit >> 20} MB are allowed: raise "
                "api.max_bundle_mb, or use `tandem store export` on its machine",
                code="conversation_too_large",
            )
        path = _directory(backend) / f"{uuid.uuid4().hex}.tandem"
        try:
            with backend.store() as store:
                client = store.client_of(conversation_id)
            if client.path == backend.config.store_socket and client.path.exists():
                _ask(backend, "export", path, ident=conversation_id)
            else:
                _fetch(backend, client, conversation_id, path)
            file = path.open("rb")
        finally:
            path.unlink(missing_ok=True)
        size = os.fstat(file.fileno()).st_size
        backend.note("export", conversation_id)
        headers = {"content-length": str(size), "x-content-type-options": "nosniff"}
        headers["content-disposition"] = f'attachment; filename="{conversation_id}.tandem"'
        media_type = "application/octet-stream"
        return StreamingResponse(_chunks(file), media_type=media_type, headers=headers)

    @routes.post("/{conversation_id}/fork")
    def fork_conversation(
        conversation_id: ConversationId, body: Fork | None = None
    ) -> dict[str, Any]:
        """An extension: a new conversation that begins with what was said in this one.

        All of it, or up to `response_id`. Its first turn goes on from the stored state.
        """
        body = body or Fork()
        record = find_conversation(backend, conversation_id)
        seed, added = divided(record)
        items = list(seed)
        node = backend.decode_node()
        upto = body.response_id or record["head"]
        if upto is not None:
            with backend.store() as store:
                if body.response_id and upto not in store.conversation_turns(conversation_id):
                    raise missing("Response", upto[:80], "response_id")
                for turn in store.path_of(upto):
                    items += turn.items
                node = store.node_of(upto) or node  # its state is there
        if body.response_id is None:
            items += added
        metadata = body.metadata if body.metadata is not None else record["metadata"]
        with backend.store() as store:
            made = store.create_conversation(
                f"conv_{uuid.uuid4().hex}",
                owner=record["owner"],
                metadata=dict(metadata),
                items=items,
                node=node,
            )
        backend.note("fork", made["id"], conversation=conversation_id)
        return shown(made) | {"forked_from": {"conversation": conversation_id, "response": upto}}


def _revive(backend: Backend, conversation: str) -> None:
    """Let an imported conversation's responses be found again where they were deleted before."""
    with backend.store() as store:
        turns = store.conversation_turns(conversation)
    if turns:
        backend.redis.delete(*(f"tandem:deleted:{turn}" for turn in turns))


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _directory(backend: Backend) -> FilePath:
    """Where files lie while they are on their way."""
    directory = backend.config.data_dir / "transfer"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _clean(backend: Backend) -> None:
    """Remove files that were on their way when the API ended last."""
    with contextlib.suppress(OSError):
        for path in (backend.config.data_dir / "transfer").iterdir():
            path.unlink(missing_ok=True)


def _fetch(backend: Backend, client: StoreClient, ident: str, path: FilePath) -> None:
    """Write an export of another machine's store to a file on this one. Raises Fault."""
    try:
        with (
            backend.store(),
            contextlib.closing(client.patient(LONG)) as patient,
            path.open("xb") as file,
        ):
            os.fchmod(file.fileno(), 0o600)
            patient.read_bundle(ident, file)
    except StoreError as error:
        raise Fault(404, str(error), code="export_failed") from error
    except OSError as error:
        raise Fault(
            507, f"the export cannot be written: {error.strerror}", code="export_failed"
        ) from error


def _ask(backend: Backend, method: str, path: FilePath, **given: Any) -> dict[str, Any]:
    """Let the store's owner write or read a file on this machine. Raises Fault."""
    client = StoreClient(backend.config.store_socket, LONG)
    try:
        with backend.store():  # says it where the owner is away
            found: dict[str, Any] = client.call(method, path=str(path), **given)
    except StoreError as error:
        text = str(error).replace(f"{path}.part", "the file").replace(str(path), "the file")
        if _INSIDE.match(text):
            raise Fault(500, "internal error; the worker's log has the details") from error
        if "belongs to someone else" in text or "other contents" in text:
            raise Fault(409, text, code="conversation_exists", retry=False) from error
        if method == "import":
            raise bad(text, "body", "invalid_file") from error
        raise Fault(507 if "write" in text else 404, text, code="export_failed") from error
    finally:
        client.close()
    return found
