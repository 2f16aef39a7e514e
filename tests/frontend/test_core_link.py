"""The link to the core from within: stream numbers, what is dropped, and that nothing is left behind (C35)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_core import Answer, FakeCore
from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import EndReason, SamplingParams, Serving, Submit
from scheduler_svc.frontend.core_link import STREAM_NUMBERS, CoreLink
from scheduler_svc.frontend.streams import Generation, Stream
from scheduler_svc.http.errors import ApiError, ClientGone, unavailable


def request(n: int = 1, max_tokens: int = 1000, prompt_logprobs: int = -1) -> Submit:
    params = SamplingParams(max_tokens, prompt_logprobs=prompt_logprobs)
    return Submit(0, n, "id", "m", np.array([1, 2, 3], np.int32), params)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    core = FakeCore(f"ipc://{tmp_path}/core", [card("m", byte_level(), CHATML)])
    yield core
    core.close()


@asynccontextmanager
async def open_link(core: FakeCore) -> AsyncIterator[CoreLink]:
    served = asyncio.Event()

    def take(_serving: Serving) -> None:
        served.set()

    link = CoreLink(core.address, "frontend-0", take, timeout_s=5.0, lost_s=30.0)
    link.open()
    try:
        await asyncio.wait_for(served.wait(), 60)
        yield link
    finally:
        link.close()


def run(core: FakeCore, scenario: Callable[[CoreLink], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_link(core) as link:
            await asyncio.wait_for(scenario(link), 60)
            assert not link.generations and link.num_streams == 0

    asyncio.run(main())


async def follow(generation: Generation) -> list[list[int]]:
    """All tokens of all streams, until all have ended."""
    tokens: dict[int, list[int]] = {stream.choice: [] for stream in generation.streams}
    open_streams = set(tokens)
    while open_streams:
        for stream in await generation.wait():
            tokens[stream.choice] += stream.tokens
            stream.tokens = []
            if stream.ended is not None:
                open_streams.discard(stream.choice)
    return [tokens[choice] for choice in sorted(tokens)]


def test_tokens_reach_their_streams_in_order(core: FakeCore) -> None:
    core.answer(Answer(range(5, 1000)), Answer(range(7, 9)), Answer(()))

    async def scenario(link: CoreLink) -> None:
        generations = [link.generation() for _ in range(3)]
        for generation in generations:
            link.submit(generation, [request(3)])
        for generation in generations:
            assert await follow(generation) == [list(range(5, 1000)), [7, 8], []]
            generation.close()

    run(core, scenario)


def test_stream_numbers_wrap_and_pass_over_live_ones(core: FakeCore) -> None:
    core.answer(Answer((5,), endless=True))

    async def scenario(link: CoreLink) -> None:
        generation = link.generation()
        link._next_number = STREAM_NUMBERS - 2
        link.submit(generation, [request(3)])
        link._next_number = STREAM_NUMBERS - 2
        link.submit(generation, [request(2)])
        link._next_number = 1
        link.submit(generation, [request(2)])
        numbers = [stream.number for stream in generation.streams]
        assert numbers == [0, 1, 2, STREAM_NUMBERS - 2, STREAM_NUMBERS - 1, 3, 4]
        generation.close()

    run(core, scenario)


def test_a_request_that_breaks_costs_no_other_its_news(core: FakeCore) -> None:
    core.answer(Answer((6, 7)))

    async def scenario(link: CoreLink) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        broken, other = link.generation(), link.generation()

        def fail() -> None:
            raise RuntimeError

        broken.listener = fail
        link.submit(broken, [request(1)])
        link.submit(other, [request(1)])
        while other.streams[0].ended is None:
            await asyncio.wait_for(other.wait(), 60)
        assert other.streams[0].tokens == [6, 7]
        for generation in (broken, other):
            generation.close()

    run(core, scenario)


def test_an_aborted_stream_hears_nothing_more_and_the_others_go_on(core: FakeCore) -> None:
    core.answer(Answer((5,), endless=True), Answer((6, 7)))

    async def scenario(link: CoreLink) -> None:
        generation = link.generation()
        link.submit(generation, [request(2)])
        first, second = generation.streams
        while not first.tokens:
            await generation.wait()
        first.stop()
        seen = list(first.tokens)
        while second.ended is None:
            await generation.wait()
        assert second.tokens == [6, 7] and second.ended.reason == EndReason.EOS
        assert first.tokens == seen and first.ended is None
        generation.close()
        generation.close()

    run(core, scenario)
    assert core.wait_for(lambda: len(core.stopped) > 0) and len(core.stopped) == 1 and not core.aborted


def test_leaving_and_failing_wake_the_one_who_waits(core: FakeCore) -> None:
    core.answer(Answer((5,), gate=None, endless=False, reason=EndReason.EOS))

    async def scenario(link: CoreLink) -> None:
        for end, error in (
            (lambda generation: generation.leave(), ClientGone),
            (lambda generation: generation.fail(unavailable("x")), ApiError),
        ):
            generation = link.generation()
            waiting = asyncio.create_task(generation.wait())
            await asyncio.sleep(0)
            end(generation)
            with pytest.raises(error):
                await waiting

    run(core, scenario)


def test_a_quiet_generation_is_woken_by_endings_alone(core: FakeCore) -> None:
    core.answer(Answer(range(500)))

    async def scenario(link: CoreLink) -> None:
        generation = link.generation()
        generation.quiet = True
        link.submit(generation, [request()])
        (stream,) = await generation.wait()
        assert stream.ended is not None and stream.tokens == list(range(500))
        generation.close()

    run(core, scenario)


def test_prompt_scores_are_gathered_in_parts(core: FakeCore) -> None:
    core.answer(Answer((5,), prompt_scores=[[(2, -1.0), (9, -0.5)], [(3, -2.0)]]))

    async def scenario(link: CoreLink) -> None:
        generation = link.generation()
        link.submit(generation, [request(prompt_logprobs=1)])
        stream: Stream = generation.streams[0]
        await follow(generation)
        assert stream.prompt_scores is not None and stream.prompt_scores.complete
        assert stream.prompt_scores.scores == [None, ([2, 9], [-1.0, -0.5]), ([3], [-2.0])]
        generation.close()

    run(core, scenario)


def test_nothing_is_left_of_many_requests(core: FakeCore) -> None:
    core.answer(Answer(range(5, 9)), Answer((5,), endless=True), Answer((), EndReason.FAILED))

    async def scenario(link: CoreLink) -> None:
        for _ in range(50):
            generation = link.generation()
            link.submit(generation, [request(3)])
            await generation.wait()
            generation.close()

    run(core, scenario)
    assert core.wait_for(lambda: core.live == 0)


def test_a_busy_frontend_does_not_take_its_core_for_silent(core: FakeCore) -> None:
    async def scenario(link: CoreLink) -> None:
        link._timeout_s = 0.3
        time.sleep(0.6)  # the event loop is held up, and the core goes on telling
        assert link.alive

    run(core, scenario)


def test_what_a_frontend_slept_through_is_no_silence_of_its_core(tmp_path: Path) -> None:
    """Its streams go on: the core had no chance either, where the machine was suspended."""

    async def main() -> None:
        link = CoreLink(f"ipc://{tmp_path}/nobody", "frontend-0", lambda _serving: None, timeout_s=5.0, lost_s=30.0)
        link.open()
        link._greeted, link._last_heard = True, time.monotonic()
        for slept_s, silent_s, is_alive in ((1000.0, 4.0, True), (0.0, 31.0, False)):
            link._tick_due = time.monotonic() - slept_s
            link._last_heard -= slept_s + silent_s
            assert link.alive is is_alive, "a request may come before the tick"
            link._timer.cancel()
            link._tick()
            assert link.alive is is_alive and link._greeted is is_alive
        link.close()

    asyncio.run(main())


def test_a_silent_core_takes_no_requests(tmp_path: Path) -> None:
    async def main() -> None:
        link = CoreLink(f"ipc://{tmp_path}/nobody", "frontend-0", lambda _serving: None, timeout_s=5.0, lost_s=30.0)
        link.open()
        generation = link.generation()
        assert not link.alive
        with pytest.raises(ApiError) as caught:
            link.submit(generation, [request()])
        assert caught.value.status == 503
        generation.close()
        link.close()

    asyncio.run(main())
