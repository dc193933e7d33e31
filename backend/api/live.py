"""Live news as server-sent events, the clock exchange, and diagnosis of uploaded files."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, UploadFile
from fastapi.responses import StreamingResponse

from lanterne.backend.api import hub, shapes
from lanterne.backend.api.context import Ctx, Who
from lanterne.backend.api.problems import Problem
from lanterne.errors import LimitExceeded
from lanterne.nouns import to_json

router = APIRouter(tags=["live"])
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
UPLOAD_FILES_MAX = 1_000


@router.get("/clock", response_model=shapes.Clock)
async def clock(context: Ctx, request: Request) -> dict[str, int]:
    """When this request came in and when the answer leaves, in the server's Unix ns."""
    return {"received_ns": int(request.scope["lanterne.received_ns"]), "sent_ns": context.clock.unix_ns()}


@router.get("/events/stream", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def stream(
    context: Ctx, who: Who, job: Annotated[str, Query(pattern=r"^[A-Za-z0-9._:-]{0,128}$")] = ""
) -> StreamingResponse:
    """Server-sent events ``step``, ``incident`` and ``command``, of one job or of all."""
    if who.job and job not in ("", who.job):
        raise Problem(404, f"there is no job {job}")
    if context.hub.listeners >= hub.LISTENERS_MAX:
        raise Problem(503, f"{hub.LISTENERS_MAX} streams are open", headers={"retry-after": "10"})

    async def lines() -> AsyncIterator[str]:
        yield ": connected\n\n"
        async for kind, body in context.hub.listen(job or who.job):
            yield ": beat\n\n" if kind == "beat" else f"event: {kind}\ndata: {json.dumps(body)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})


@router.post("/diagnose")
async def diagnose(context: Ctx, files: list[UploadFile]) -> Any:
    """Diagnose files of a dead job: Flight Recorder dumps, Kineto traces, NCCL and trainer logs."""
    if len(files) > UPLOAD_FILES_MAX:
        raise LimitExceeded(f"{len(files)} files; at most {UPLOAD_FILES_MAX} are taken")
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="lanterne-upload-"))
    try:
        paths = [await _save(file, folder, n) for n, file in enumerate(files)]
        async with context.heavy:
            return await asyncio.to_thread(_judge, paths, folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def _save(file: UploadFile, folder: Path, number: int) -> Path:
    """Keep the file's own name, which tells readers the rank, but only its harmless characters and its last part."""
    name = _UNSAFE.sub("_", (file.filename or "").replace("\\", "/").rsplit("/", 1)[-1])[-120:].lstrip(".")
    place = folder / str(number)
    await asyncio.to_thread(place.mkdir)
    path = place / (name or "file")
    with path.open("wb") as target:
        while part := await file.read(1 << 20):
            await asyncio.to_thread(target.write, part)
    return path


def _judge(paths: list[Path], folder: Path) -> Any:
    from lanterne.backend import readers

    found = to_json(readers.diagnose_paths(paths))
    return json.loads(json.dumps(found).replace(str(folder) + "/", ""))
