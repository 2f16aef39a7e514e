"""The runner over a real database, with answers that the test makes."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.wire import Stats
from scheduler_svc.batch_runner import live_batch, runner
from scheduler_svc.batch_runner.answering import LineAnswer
from scheduler_svc.batch_runner.models_seen import ModelsSeen
from scheduler_svc.batch_runner.runner import Runner
from scheduler_svc.batch_runner.settings import RunnerSettings
from scheduler_svc.batches.database import SqliteDatabase, StorageError
from scheduler_svc.batches.records import BatchRecord, Status
from scheduler_svc.batches.store import Store
from scheduler_svc.batches.store_thread import StoreThread
from scheduler_svc.http.errors import ApiError, invalid, timed_out, unavailable
from scheduler_svc.http.fields import Fields
from tests.batches.stored import put_batch, put_file

Answer = Callable[[str], Awaitable[dict[str, Any]]]


class World:
    """A runner, its database, and a core that has eight seats."""

    def __init__(self, folder: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch, most: int = 4) -> None:
        self.database = SqliteDatabase(folder)
        self.store = Store(self.database)
        self.calls: list[str] = []
        self.in_flight, self.most_in_flight = 0, 0
        self.frontend = SimpleNamespace(stopping=False, models=[SimpleNamespace(name="m")], link=SimpleNamespace())
        self.frontend.link.num_streams = 0
        self.frontend.link.stats = Stats(True, False, {"gilir_seats": 8.0})
        self._folder, self._answer, self._most = folder, answer, most
        monkeypatch.setattr(runner, "answer_request", self._answer_request)
        for name in ("LOOK_S", "TURN_S", "RETRY_S"):
            monkeypatch.setattr(runner, name, 0.01)
        monkeypatch.setattr(live_batch, "MIN_BACKOFF_S", 0.01)

    async def _answer_request(
        self, _frontend: object, _record: BatchRecord, body: Fields, _request_id: str, _left_s: float
    ) -> LineAnswer:
        prompt = str(body.raw("prompt"))
        self.calls.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            body = await self._answer(prompt)
            return LineAnswer(body, body["usage"])
        finally:
            self.in_flight -= 1

    async def run_until(self, condition: Callable[[], bool]) -> None:
        """A runner's whole life: from its start until the condition holds, then it is stopped."""
        settings = RunnerSettings(core="ipc://none", batch_dir=self._folder, batch_max_in_flight=self._most)
        thread = StoreThread(SqliteDatabase(self._folder))
        running = Runner(settings, self.frontend, thread)  # type: ignore[arg-type]
        task = asyncio.create_task(running.run())
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and not task.done(), "it did not come about in time"
            await asyncio.sleep(0.005)
        running.stop()
        await task
        thread.close()

    def until(self, condition: Callable[[], bool]) -> None:
        asyncio.run(self.run_until(condition))

    def expire(self, batch: BatchRecord) -> None:
        """Its window is over now."""
        with self.database.transaction() as cursor:
            cursor.execute("UPDATE batches SET expires_at = ? WHERE id = ?", (int(time.time()) - 1, batch.id))

    def batch(self, batch_id: str, tenant: str = "") -> BatchRecord:
        found = self.store.find(tenant, batch_id)
        assert found is not None
        return found

    def results(self, file_id: str | None) -> dict[str, Any]:
        """Results by custom id; each must be there once."""
        if file_id is None:
            return {}
        file = self.store.files.find("", file_id)
        assert file is not None and file.batch_id is not None
        rows, found = [], -1
        while page := self.store.files.results(file.batch_id, file.outcome, found):  # type: ignore[arg-type]
            rows += [json.loads(result) for _, result in page]
            found = page[-1][0]
        by_id = {row["custom_id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id


def lines(*prompts: str, **body: Any) -> bytes:
    rows = [{"custom_id": p, "method": "POST", "url": "/v1/completions", "body": {"prompt": p} | body} for p in prompts]
    return "\n".join(map(json.dumps, rows)).encode()


def text(prompt: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return {"text": f"re: {prompt}", "usage": usage}


async def at_once(prompt: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return text(prompt)


def test_every_line_is_answered_once_and_no_more_at_a_time_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(prompt: str) -> dict[str, Any]:
        await asyncio.sleep(0.002)
        return text(prompt)

    world = World(tmp_path, slowly, monkeypatch)
    prompts = [f"p{i}" for i in range(150)]
    batch = put_batch(world.store, put_file(world.store, lines(*prompts)))
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    found = world.batch(batch.id)
    assert found.describe()["request_counts"] == {"total": 150, "completed": 150, "failed": 0}
    assert found.prompt_tokens == 300 and found.completion_tokens == 450 and found.error_file_id is None
    results = world.results(found.output_file_id)
    assert list(results) == prompts and sorted(world.calls) == sorted(prompts)
    assert results["p7"]["response"]["status_code"] == 200 and results["p7"]["error"] is None
    assert results["p7"]["response"]["body"]["text"] == "re: p7"
    assert world.most_in_flight == 4


def test_what_cannot_be_served_now_is_tried_again_and_what_never_can_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: Counter[str] = Counter()

    async def moody(prompt: str) -> dict[str, Any]:
        tries[prompt] += 1
        if prompt == "busy" and tries[prompt] < 4:
            raise ApiError(429, "full", headers={"retry-after": "0"})
        if prompt == "away" and tries[prompt] < 3:
            raise unavailable("no executor")
        if prompt == "late" and tries[prompt] < 2:
            raise timed_out("took too long")
        if prompt == "wrong":
            raise invalid("prompt", "no")
        if prompt == "broken":
            raise RuntimeError("a fault of ours")
        return await at_once(prompt)

    world = World(tmp_path, moody, monkeypatch)
    content = lines("busy", "away", "late", "wrong", "broken", "fine") + b"\n{"
    batch = put_batch(world.store, put_file(world.store, content))
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    found = world.batch(batch.id)
    assert set(world.results(found.output_file_id)) == {"busy", "away", "late", "fine"}
    errors = world.results(found.error_file_id)
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "prompt"
    assert errors["broken"]["response"]["status_code"] == 500
    assert errors[None]["error"]["code"] == "invalid_json"
    assert tries["busy"] == 4 and tries["away"] == 3 and tries["wrong"] == tries["broken"] == 1
    assert found.describe()["request_counts"] == {"total": 7, "completed": 4, "failed": 3}


def test_a_model_that_is_not_there_is_waited_for_before_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(_prompt: str) -> dict[str, Any]:
        raise ApiError(404, "The model does not exist.", param="model", code="model_not_found")

    world = World(tmp_path, unknown, monkeypatch)
    monkeypatch.setattr(ModelsSeen, "may_come", lambda *_: len(world.calls) < 3)
    batch = put_batch(world.store, put_file(world.store, lines("a", model="gone")))
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    errors = world.results(world.batch(batch.id).error_file_id)
    assert errors["a"]["response"]["status_code"] == 404 and len(world.calls) == 3
    assert world.batch(batch.id).model == "gone"


def test_a_runner_goes_on_where_the_last_one_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(prompt: str) -> dict[str, Any]:
        await asyncio.sleep(0.005)
        return text(prompt)

    world = World(tmp_path, slowly, monkeypatch)
    prompts = [f"p{i}" for i in range(40)]
    batch = put_batch(world.store, put_file(world.store, lines(*prompts)))
    for share in (10, 20, 30):
        world.until(lambda share=share: world.batch(batch.id).completed >= share)  # type: ignore[misc]
        assert world.in_flight == 0
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    assert list(world.results(world.batch(batch.id).output_file_id)) == prompts
    # Only what was in flight at a stop ran again.
    assert len(world.calls) <= 40 + 3 * 4


def test_a_batch_that_is_cancelled_or_expires_stops_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(prompt: str) -> dict[str, Any]:
        if prompt != "quick":
            await asyncio.sleep(3600)
        return text(prompt)

    world = World(tmp_path, forever, monkeypatch)
    file = put_file(world.store, lines("quick", "a", "b"))
    cancelled, expired = put_batch(world.store, file), put_batch(world.store, file)

    def end_both() -> bool:
        """Each once its first line is done."""
        if is_half_done(cancelled):
            world.store.cancel("", cancelled.id)
        if is_half_done(expired):
            world.expire(expired)
        return all(world.batch(batch.id).finalizing_at for batch in (cancelled, expired))

    def is_half_done(batch: BatchRecord) -> bool:
        found = world.batch(batch.id)
        return found.completed == 1 and found.status == Status.IN_PROGRESS

    world.until(end_both)
    assert world.batch(cancelled.id).status == Status.CANCELLED
    assert set(world.results(world.batch(cancelled.id).output_file_id)) == {"quick"}
    assert world.batch(cancelled.id).error_file_id is None
    assert world.batch(expired.id).status == Status.EXPIRED
    assert set(world.results(world.batch(expired.id).output_file_id)) == {"quick"}
    assert set(world.results(world.batch(expired.id).error_file_id)) == {"a", "b"}
    assert world.in_flight == 0


def test_batches_that_are_over_before_they_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, at_once, monkeypatch)
    unusable = put_batch(world.store, put_file(world.store, b"{\n}\n"))
    late = put_batch(world.store, put_file(world.store, lines("a")), expires_at=int(time.time()) - 1)
    cancelled = put_batch(world.store, put_file(world.store, lines("a")))
    world.store.cancel("", cancelled.id)
    world.until(lambda: not world.store.live())
    assert world.batch(unusable.id).status == Status.FAILED
    assert [error["line"] for error in world.batch(unusable.id).describe()["errors"]["data"]] == [1, 2]
    assert world.batch(late.id).status == Status.EXPIRED and world.batch(cancelled.id).status == Status.CANCELLED
    assert world.calls == []


def test_a_batch_whose_input_was_read_while_the_runner_looked_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, at_once, monkeypatch)
    batch = put_batch(world.store, put_file(world.store, lines(*"abcdefgh")))
    live, seen = Store.live, []

    def late(store: Store) -> list[BatchRecord]:
        """As it was before its lines began to run, once."""
        records = live(store)
        if seen or not any(record.completed for record in records):
            return records
        seen.append(batch)
        return [batch]

    monkeypatch.setattr(Store, "live", late)
    world.frontend.link.stats = Stats(True, False, {"gilir_seats": 1.0})
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    assert seen and sorted(world.calls) == list("abcdefgh")
    assert list(world.results(world.batch(batch.id).output_file_id)) == list("abcdefgh")


def test_tenants_share_the_seats_however_long_their_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(prompt: str) -> dict[str, Any]:
        await asyncio.sleep(0.003)
        return text(prompt)

    world = World(tmp_path, slowly, monkeypatch)
    long = put_batch(world.store, put_file(world.store, lines(*(f"long{i}" for i in range(60))), tenant="A"))
    short = put_batch(world.store, put_file(world.store, lines(*(f"short{i}" for i in range(10))), tenant="B"))
    world.until(lambda: world.batch(short.id, "B").status == Status.COMPLETED)
    assert world.batch(long.id, "A").completed < 40


def test_nothing_runs_while_others_need_the_seats_or_the_service_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(_prompt: str) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    world = World(tmp_path, forever, monkeypatch)
    put_batch(world.store, put_file(world.store, lines(*"abcdefgh")))
    link = world.frontend.link
    link.stats = Stats(True, False, {"gilir_seats": 8.0, "gilir_live_sequences": 6.0})

    async def scene() -> None:
        stage = 0

        def advance() -> bool:
            nonlocal stage
            if stage == 0 and world.in_flight == 2:
                link.stats, stage = Stats(True, False, {"gilir_seats": 8.0, "gilir_live_sequences": 10.0}), 1
            elif stage == 1:
                world.frontend.stopping, stage = True, 2
            return stage == 2 and world.in_flight == 0

        await world.run_until(advance)

    asyncio.run(scene())
    assert world.most_in_flight == 2 and len(world.calls) == 2


def test_an_answer_outlives_a_database_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, at_once, monkeypatch)
    real, refusals = Store.finish_line, iter(range(3))

    def full_disk(store: Store, *arguments: Any) -> bool:
        if next(refusals, None) is not None:
            raise StorageError("database or disk is full")
        return real(store, *arguments)

    monkeypatch.setattr(Store, "finish_line", full_disk)
    batch = put_batch(world.store, put_file(world.store, lines("a")))
    world.until(lambda: world.batch(batch.id).status == Status.COMPLETED)
    assert world.calls == ["a"] and world.batch(batch.id).completed == 1
