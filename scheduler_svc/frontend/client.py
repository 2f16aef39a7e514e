"""Notices, beside the work for a request, that its client has closed the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class ClientWatch:
    """To be made once the body has been read. `on_gone` is called once, when the client leaves."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(receive, on_gone))

    @staticmethod
    async def _watch(receive: Receive, on_gone: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()
