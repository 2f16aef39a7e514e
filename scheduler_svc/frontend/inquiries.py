"""Questions to the core about live requests. Any frontend may ask about any request: only the core knows them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.wire import Account, Inquiry
from scheduler_svc.frontend.errors import unavailable

MAX_PENDING = 64
TIMEOUT_S = 2.0
NUMBERS = 1 << 32


class Inquiries:
    """`ask` waits for the `Account` that `take` is given."""

    def __init__(self, send: Callable[[Inquiry], bool]) -> None:
        self._send = send
        self._pending: dict[int, asyncio.Future[Account]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._pending)

    async def ask(self, request_id: str, tenant: str = "") -> Account:
        """What the core says of a request, of this tenant where one is given.

        Raises `ApiError` 503 when it does not say anything in time.
        """
        if len(self._pending) >= MAX_PENDING:
            raise unavailable("too many questions at a time", "busy", retry_after_s=1)
        # Far more numbers than pending questions: none comes again while it is awaited.
        self._last_number = number = (self._last_number + 1) % NUMBERS
        answer = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            if not self._send(Inquiry(number, request_id, tenant)):
                raise unavailable("the scheduler does not keep up")
            return await asyncio.wait_for(answer, TIMEOUT_S)
        except TimeoutError:
            raise unavailable("the scheduler does not answer", "no_scheduler") from None
        finally:
            del self._pending[number]

    def take(self, account: Account) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        answer = self._pending.get(account.number)
        if answer is not None and not answer.done():
            answer.set_result(account)
