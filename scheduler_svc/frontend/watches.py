"""Questions to the core about its newest iterations."""

from __future__ import annotations

from collections.abc import Callable

from common.wire import Iterations, Watch
from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.questions import Questions


class Watches:
    """`ask` waits for the `Iterations` that `take` is given."""

    def __init__(self, send: Callable[[Watch], bool]) -> None:
        self._send = send
        self._questions: Questions[Iterations] = Questions()

    async def ask(self, after: int, *, queue: bool) -> Iterations:
        """What came after an iteration of the ring; with `queue` also who waits.

        Raises `ApiError` 503 when the core does not say anything in time.
        """

        async def send(number: int) -> None:
            if not self._send(Watch(number, after, queue)):
                raise unavailable("the scheduler does not keep up")

        return await self._questions.ask(send)

    def take(self, answer: Iterations) -> None:
        """An answer came."""
        self._questions.take(answer.number, answer)
