"""Questions to the core about live requests. Any frontend may ask about any request: only the core knows them all."""

from __future__ import annotations

from collections.abc import Callable

from common.wire import Account, Inquiry
from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.questions import Questions


class Inquiries:
    """`ask` waits for the `Account` that `take` is given."""

    def __init__(self, send: Callable[[Inquiry], bool]) -> None:
        self._send = send
        self._questions: Questions[Account] = Questions()

    def __len__(self) -> int:
        return len(self._questions)

    async def ask(self, request_id: str, tenant: str = "") -> Account:
        """What the core says of a request, of this tenant where one is given.

        Raises `ApiError` 503 when it does not say anything in time.
        """

        async def send(number: int) -> None:
            if not self._send(Inquiry(number, request_id, tenant)):
                raise unavailable("the scheduler does not keep up")

        return await self._questions.ask(send)

    def take(self, account: Account) -> None:
        """An answer came."""
        self._questions.take(account.number, account)
