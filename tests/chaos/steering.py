"""Executors and the model steered over the admin API, as an operator does it while all kinds of things happen."""

from __future__ import annotations

import asyncio
import json
import time

from tests.chaos.client import exchange
from tests.chaos.services import POLL_S, Member, Services

MODEL = "/admin/models/model"
RESUME_S = 5.0
"""A command that nobody answers is given again for so long."""
RELEASE_S = 10.0
AGAIN_S = 1.0
"""An executor that has lost its connection has forgotten that it was let go: it is told so again after this time."""


class Operator:
    """Steers the executors of some services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def drain(self, member: Member, timeout_s: float = 0.0) -> None:
        """Nothing happens where it is not attached. `timeout_s`: 0 for none."""
        await self._command("POST", f"{_path(member)}/drain", {"timeout_s": timeout_s} if timeout_s else {})

    async def resume(self, member: Member) -> None:
        """It takes sequences again, or is gone, or dials anew, which is as good."""
        await self._resume(_path(member))

    async def release(self, member: Member) -> None:
        """Let it go. At the latest after `RELEASE_S` it is told by a signal."""
        member.leaving = True
        deadline = time.monotonic() + RELEASE_S
        while member.lives and time.monotonic() < deadline:
            await self._command("DELETE", _path(member))
            again = min(deadline, time.monotonic() + AGAIN_S)
            while member.lives and time.monotonic() < again:
                await asyncio.sleep(POLL_S)
        member.leave()

    async def pause_model(self, seconds: float) -> None:
        await self._command("POST", f"{MODEL}/pause")
        await asyncio.sleep(seconds)
        await self._resume(MODEL)

    async def _resume(self, path: str) -> None:
        deadline = time.monotonic() + RESUME_S
        while await self._command("POST", f"{path}/resume") not in (202, 404, 409) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def _command(self, method: str, path: str, fields: dict[str, float] | None = None) -> int:
        """The status of the answer; 0 when there is none."""
        body = json.dumps(fields).encode() if fields else b""
        return (await exchange(self._services.admin_port, method, path, body, patience_s=RESUME_S)).status


def _path(member: Member) -> str:
    return f"/admin/executors/{member.name}"
