"""Notices, beside the work for a request, that its client has closed the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Receive


class ClientWatch:
    """To be made once the body has been read. `on_gone` is called once, when the client leaves."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.on_gone: Callable[[], Any] | None = None
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()

    def close(self) -> None:
        """Stop watching."""
        self.on_gone = None
        self._task.cancel()
