"""A frontend takes connections when it knows what is served, however often the core has said so by then."""

from __future__ import annotations

import asyncio

from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import Serving
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.settings import FrontendSettings


def test_an_announcement_that_was_overtaken_settles_nothing() -> None:
    serving = Serving((card("m", byte_level(), CHATML),), (100,))

    async def main() -> None:
        frontend = Frontend(FrontendSettings(core="ipc://none"))
        frontend._take_serving(serving)
        frontend._take_serving(serving)
        await frontend.settle()
        assert len(frontend.models) == 1
        frontend.builder.shutdown()

    asyncio.run(main())
