"""Long texts wait in turn by tenant; those that will hardly fit take none of the others' threads; nor do new models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import ModelCard, Serving
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.models import USUAL_CHARACTERS, _build
from scheduler_svc.frontend.prompts import run_in_pool, tokenize
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.frontend.text_threads import TextThreads
from scheduler_svc.http.errors import ApiError, ClientGone

PATIENCE_S = 60.0


class Texts:
    """Work that notes when it begins, and ends when it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._news = threading.Semaphore(0)
        self._gates: dict[str, threading.Event] = {}

    def text(self, name: str, *, held: bool = False) -> Callable[[], str]:
        gate = self._gates[name] = threading.Event()
        if not held:
            gate.set()

        def work() -> str:
            self.begun.append(name)
            self._news.release()
            assert gate.wait(PATIENCE_S)
            return name.upper()

        return work

    async def begin(self, count: int) -> None:
        """Wait until so many more have begun."""
        for _ in range(count):
            assert await asyncio.to_thread(self._news.acquire, timeout=PATIENCE_S)

    def let_go(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()


@pytest.fixture
def texts() -> Iterator[Texts]:
    texts = Texts()
    yield texts
    texts.let_go()


def test_tenants_take_turns(texts: Texts) -> None:
    async def main() -> None:
        threads = TextThreads(1)
        names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        outcomes = [threads.submit(name[0], texts.text(name, held=name == "a1"), doubtful=False) for name in names]
        await texts.begin(1)
        texts.let_go()
        assert await asyncio.gather(*outcomes) == [name.upper() for name in names]
        threads.shutdown()

    asyncio.run(main())
    assert texts.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_a_thread_goes_to_who_has_the_fewest(texts: Texts) -> None:
    async def main() -> None:
        threads = TextThreads(3)
        for name in ("a1", "a2", "b1", "a3", "a4"):
            threads.submit(name[0], texts.text(name, held=name != "a4"), doubtful=False)
        await texts.begin(3)
        late = threads.submit("c", texts.text("c1"), doubtful=False)
        assert sorted(texts.begun) == ["a1", "a2", "b1"], "alone, a tenant has what threads there are"
        texts.let_go("a1")
        assert await late == "C1"
        threads.shutdown()

    asyncio.run(main())
    assert texts.begun[3] == "c1"


def test_doubtful_ones_take_one_thread_and_no_other(texts: Texts) -> None:
    async def main() -> None:
        threads = TextThreads(2)
        for name in ("huge 1", "huge 2", "huge 3"):
            threads.submit("", texts.text(name, held=True), doubtful=True)
        await texts.begin(1)
        usual = [threads.submit("", texts.text(name), doubtful=False) for name in ("one", "two", "three")]
        assert await asyncio.gather(*usual) == ["ONE", "TWO", "THREE"]
        assert [name for name in texts.begun if "huge" in name] == ["huge 1"]
        threads.shutdown()

    asyncio.run(main())


def test_what_is_given_up_frees_its_turn_and_what_fails_its_thread(texts: Texts) -> None:
    def fail() -> None:
        raise ValueError("no text")

    async def main() -> None:
        threads = TextThreads(1)
        running = threads.submit("a", texts.text("running", held=True), doubtful=False)
        await texts.begin(1)
        waiting = threads.submit("a", texts.text("waiting"), doubtful=False)
        failing = threads.submit("b", fail, doubtful=False)
        last = threads.submit("a", texts.text("last"), doubtful=False)
        running.cancel()
        waiting.cancel()
        assert texts.begun == ["running"], "its thread is still busy"
        texts.let_go()
        with pytest.raises(ValueError, match="no text"):
            await failing
        assert await last == "LAST"
        threads.shutdown()

    asyncio.run(main())
    assert texts.begun == ["running", "last"]


def test_the_end_cancels_what_waits(texts: Texts) -> None:
    async def main() -> None:
        threads = TextThreads(1)
        threads.submit("", texts.text("running", held=True), doubtful=False)
        await texts.begin(1)
        waiting = threads.submit("", texts.text("waiting"), doubtful=False)
        threads.shutdown()
        assert waiting.cancelled()

    asyncio.run(main())


class Noted(TextThreads):
    """Notes what is thought of each text."""

    def __init__(self) -> None:
        super().__init__(1)
        self.doubted: list[bool] = []

    def submit(self, tenant: str, work: Callable[[], Any], *, doubtful: bool) -> asyncio.Future[Any]:
        self.doubted.append(doubtful)
        return super().submit(tenant, work, doubtful=doubtful)


def test_a_text_is_doubted_by_its_length_and_accepted_if_it_fits() -> None:
    """The tokens are those of the whole text in either case."""
    model = _build(card("m", byte_level(), CHATML, max_model_len=64), 1000)
    backend, limit = byte_level()[0], 64 * USUAL_CHARACTERS
    long = "<|im_start|>" * 43  # twelve characters a token
    assert len(long) > limit

    async def main() -> list[bool]:
        threads = Noted()
        generation = Generation(lambda numbers, *, stopped=False: None, lambda _generation: None)
        for text in ("the lazy dog", long):
            ids = await tokenize(text, model, True, "prompt", threads, generation, in_pool=True)
            assert ids.tolist() == backend.encode(text).ids
        with pytest.raises(ApiError, match="holds 64 tokens"):
            await tokenize("dog " * (limit // 4 + 1), model, True, "prompt", threads, generation, in_pool=True)
        threads.shutdown()
        return threads.doubted

    assert asyncio.run(main()) == [False, True, True]


def test_a_client_that_leaves_is_told_at_once(texts: Texts) -> None:
    async def main() -> None:
        threads = TextThreads(1)
        generation = Generation(lambda numbers, *, stopped=False: None, lambda _generation: None)
        work = run_in_pool(threads, generation, texts.text("running", held=True), doubtful=False)
        waiter = asyncio.ensure_future(work)
        await texts.begin(1)
        generation.leave()
        with pytest.raises(ClientGone):
            await waiter
        threads.shutdown()

    asyncio.run(main())


def test_new_models_are_built_while_texts_are_tokenized(texts: Texts) -> None:
    models: tuple[ModelCard, ...] = (card("m", byte_level(), CHATML),)

    async def main() -> None:
        frontend = Frontend(FrontendSettings(core="ipc://none", tokenizer_threads=1))
        for doubtful in (False, True):
            frontend.pool.submit("", texts.text(f"{doubtful}", held=True), doubtful=doubtful)
        await texts.begin(2)
        assert await asyncio.wait_for(frontend.models.update(Serving(models, (100,))), PATIENCE_S)
        assert len(frontend.models) == 1
        frontend.pool.shutdown()
        frontend.builder.shutdown()

    asyncio.run(main())
