"""The live websocket: says that a run changed, at most four times a second."""

import asyncio

import msgspec
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from sqlalchemy import select

from fp8scope_protocol.documents import LiveDocument
from fp8scope_server.changes import Changes
from fp8scope_server.database import Database
from fp8scope_server.models import Run
from fp8scope_server.runs import read_last_step, unknown_run

PAUSE = 0.25
"""Least seconds between two messages."""

router = APIRouter(prefix="/api/v1")


@router.websocket("/runs/{run}/live")
async def live(websocket: WebSocket, run: str) -> None:
    """Push a LiveDocument now and after each change of the run, until the other side leaves."""
    database: Database = websocket.app.state.database
    async with database.session() as session:
        if await session.scalar(select(Run.id).where(Run.id == run)) is None:
            raise await unknown_run(session, run)
    await websocket.accept()
    try:
        async with asyncio.TaskGroup() as group:
            push = group.create_task(_push(websocket, run))
            async for _ in websocket.iter_text():
                pass  # nothing is expected from the other side but that it leaves
            push.cancel()
    except* WebSocketDisconnect:
        pass


async def _push(websocket: WebSocket, run: str) -> None:
    database: Database = websocket.app.state.database
    changes: Changes = websocket.app.state.changes
    sent: int | None = None
    while True:
        version = changes.version(run)
        if version != sent:
            async with database.session() as session:
                document = LiveDocument(version=version, last_step=await read_last_step(session, run))
            await websocket.send_text(msgspec.json.encode(document).decode())
            sent = version
            await asyncio.sleep(PAUSE)
        await changes.wait(run, version, timeout=60)
