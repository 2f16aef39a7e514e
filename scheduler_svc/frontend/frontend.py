"""What the requests of one frontend process share."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import structlog
from starlette.requests import Request

from common.wire import Serving
from scheduler_svc.frontend.constraints.checker import GrammarChecker
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.dashboard.feed import Feed
from scheduler_svc.frontend.key_ring import KeyRing
from scheduler_svc.frontend.models import Models
from scheduler_svc.frontend.resuming.keeper import Keeper
from scheduler_svc.frontend.resuming.peers import Peers
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.frontend.text_threads import TextThreads
from scheduler_svc.http.body_budget import BodyBudget
from scheduler_svc.http.errors import unavailable
from scheduler_svc.http.patience import patience

log = structlog.get_logger()

SWEEP_S = 1.0


class Frontend:
    """The link to the core, the served models, the threads, and whether new requests are taken."""

    def __init__(self, settings: FrontendSettings) -> None:
        self.settings = settings
        self.pool = TextThreads(settings.tokenizer_threads)
        self.builder = ThreadPoolExecutor(1, "model-builder")
        self.models = Models(self.builder)
        self.grammars = GrammarChecker(settings.grammar_cpu_s)
        self.bodies = BodyBudget(settings.max_bodies_mb << 20)
        secret = settings.api_key
        self.keys = KeyRing(settings.api_keys, None if secret is None else secret.get_secret_value())
        self.link = CoreLink(
            settings.core, settings.name, self._take_serving, settings.core_timeout_s, settings.core_lost_s
        )
        self.keeper = Keeper(settings.resume_hold_s, settings.resume_buffer_mb << 20)
        self.link.kept = lambda: (len(self.keeper), self.keeper.num_bytes)
        self.peers = Peers(settings.core, settings.name, self.keeper)
        self.feed = Feed(self.link.watches.ask)
        self.leaving = False
        """This process has been told to end."""
        self._updates: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        """The first announcement of the core has been taken over."""

    def open(self) -> None:
        self.link.open()
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def settle(self) -> None:
        """Wait until it is known here what the core serves, but no longer than a core may be silent.

        A frontend that took connections before would refuse them, while its peers, or it itself a little later, would
        not.
        """
        with contextlib.suppress(TimeoutError):
            async with patience(self.settings.core_timeout_s):
                await self._settled.wait()

    def close(self) -> None:
        self._sweeper.cancel()
        self.keeper.close()
        self.link.close()
        self.pool.shutdown()
        self.grammars.close()
        self.builder.shutdown(wait=False, cancel_futures=True)

    def _take_serving(self, serving: Serving) -> None:
        task = asyncio.get_running_loop().create_task(self._learn(serving))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def _learn(self, serving: Serving) -> None:
        if await self.models.update(serving):
            self._settled.set()

    @property
    def live(self) -> bool:
        """Whether the core's loop turns, as far as is known here."""
        return self.link.alive

    @property
    def stopping(self) -> bool:
        stats = self.link.stats
        return self.leaving or (stats is not None and stats.stopping)

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        stats = self.link.stats
        return self.live and not self.stopping and stats is not None and stats.ready and len(self.models) > 0

    def admit(self) -> None:
        """Raise `ApiError` 503 if no new request is taken."""
        if self.stopping:
            raise unavailable("the service is stopping", "shutting_down")
        if not self.live:
            raise unavailable("the scheduler does not answer", "no_scheduler")

    def _sweep(self) -> None:
        """Each second: break connections whose readers have fallen too far behind, which aborts their requests."""
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        for generation in list(self.link.generations):
            unsent = generation.unsent_tokens if generation.sending else 0
            if unsent > self.settings.max_unsent_tokens and generation.cut_off is not None:
                log.warning("a client reads too slowly: cut off", unsent_tokens=unsent)
                generation.cut_off()


def frontend_of(request: Request) -> Frontend:
    return request.app.state.frontend  # type: ignore[no-any-return]
