"""Questions of a frontend to the core: about live requests, all of which only it knows, and its newest iterations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.wire import Account, Inquiry, Iterations, Message, Watch
from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.questions import Questions

A = TypeVar("A")


class _Asking(Questions[A]):
    """Questions that go out by a link which says whether it could send."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        super().__init__()
        self._send = send

    async def put(self, question: Callable[[int], Message]) -> A:
        """The answer to a question, which is made for its number. Raises `ApiError` 503 when none comes in time."""

        async def send(number: int) -> None:
            if not self._send(question(number)):
                raise unavailable("the scheduler does not keep up")

        return await self.ask(send)


class Inquiries:
    """`ask` waits for the `Account` that `take` is given."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._questions: _Asking[Account] = _Asking(send)

    def __len__(self) -> int:
        return len(self._questions)

    async def ask(self, request_id: str, tenant: str = "") -> Account:
        """What the core says of a request, of this tenant where one is given. Raises `ApiError` 503."""
        return await self._questions.put(lambda number: Inquiry(number, request_id, tenant))

    def take(self, account: Account) -> None:
        """An answer came."""
        self._questions.take(account.number, account)


class Watches:
    """`ask` waits for the `Iterations` that `take` is given."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._questions: _Asking[Iterations] = _Asking(send)

    async def ask(self, after: int, *, status: bool) -> Iterations:
        """What came after an iteration of the ring; with `status` also who waits and what the KV blocks hold.

        Raises `ApiError` 503.
        """
        return await self._questions.put(lambda number: Watch(number, after, status))

    def take(self, answer: Iterations) -> None:
        """An answer came."""
        self._questions.take(answer.number, answer)
