"""The live page's routes: its files, its events, who may see what, and how many may look."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from frontend_service import Service, error_of, run_service, wait_until

from common.wire import Iterations, SeenBlocks, SeenLane, SeenSequence, SeenWaiting, Stats, Watch
from common.wire.watching import NOBODY
from scheduler_svc.frontend.dashboard import feed as feed_module
from scheduler_svc.frontend.dashboard.feed import HISTORY, MAX_VIEWERS, Feed
from scheduler_svc.frontend.dashboard.routes import FILES, POLICY
from scheduler_svc.frontend.dashboard.viewer import MAX_BEHIND, Viewer
from scheduler_svc.http.errors import ApiError, unavailable
from scheduler_svc.keys import ApiKey, add_key, fingerprint_of, new_secret

Event = tuple[str, Any]
LANE = SeenLane(7, "gpu-0", "m", "attached", 8, 2, 64, 16, 100, 30, 20)


def seen(number: int, tenant: str = "") -> SeenSequence:
    return SeenSequence(number, f"request-{number}", 0, tenant, 5)


def rows_after(after: int, newest: int, **more: Any) -> Iterations:
    """Iterations in which sequence 1 decodes in seat 3 and sequence 2 has a chunk of 9 in seat 0."""
    count = min(64, newest - after)
    ones = np.ones(count, np.int32)
    return Iterations(
        0,
        newest,
        after + 1,
        lanes=(LANE,),
        epochs=7 * ones,
        iterations=np.arange(after + 1, after + 1 + count),
        planned_at=np.linspace(1, 2, count),
        seconds=0.01 * ones,
        lost=0 * ones,
        num_decodes=ones,
        num_prefills=ones,
        num_left=0 * ones,
        decode_slots=3 * ones,
        decode_sequences=ones,
        prefill_slots=0 * ones,
        prefill_sequences=2 * ones,
        prefill_lengths=9 * ones,
        **more,
    )


@contextmanager
def watching(service: Service, **headers: str) -> Iterator[Iterator[Event]]:
    """The events of a viewer."""
    with httpx.stream("GET", service.url + "/dashboard/events", headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events_of(answer.iter_lines())


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def until_nobody_watches(service: Service) -> None:
    """Fails when the core is still asked for iterations some time after the last viewer has gone."""

    def is_quiet() -> bool:
        asked = len(service.core.watches)
        threading.Event().wait(0.35)
        return len(service.core.watches) == asked

    wait_until(is_quiet, timeout_s=3.0)


def first(events: Iterator[Event], kind: str) -> Any:
    return next(data for found, data in events if found == kind)


def test_the_page_and_its_files_come_with_a_strict_policy(service: Service) -> None:
    assert {"/dashboard", "/dashboard/main.js", "/dashboard/style.css"} <= FILES.keys()
    for path, file in FILES.items():
        answer = service.get(path)
        assert answer.status_code == 200 and answer.content == file.read_bytes()
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert service.get("/dashboard").headers["content-type"] == "text/html; charset=utf-8"
    assert service.get("/dashboard/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert "unsafe" not in POLICY and "http" not in POLICY and POLICY.startswith("default-src 'none'")
    page = FILES["/dashboard"].read_text()
    assert "style=" not in page and " on" + "click" not in page and "<script>" not in page
    for path in ("/dashboard/", "/dashboard/nothing.js", "/dashboard/..%2froutes.py", "/dashboard/index.html"):
        assert service.get(path).status_code == 404


def test_a_viewer_is_sent_rows_names_lanes_queue_and_latency(service: Service) -> None:
    waiting = SeenWaiting(seen(5), "seats", 1.5, 4, 1)
    blocks = SeenBlocks(7, 2, np.array([0, 2, 3, 1], np.uint8), np.array([NOBODY, 1, 2, NOBODY], np.uint32))
    service.core.stats = Stats(
        True, False, {}, {"gilir_iterations": 12.0}, {"vllm:time_to_first_token_seconds": (1.0, 2.0, 3.0, 9.0)}
    )
    wait_until(lambda: "gilir_iterations_total 12" in service.get("/metrics").text)

    def answer(asked: Watch) -> Iterations:
        if asked.after:
            return Iterations(0, 1005, asked.after + 1, lanes=(LANE,))
        told = {"waiting": (waiting,), "num_waiting": {"seats": 1}, "blocks": (blocks,)}
        queue: dict[str, Any] = told if asked.status else {}
        return rows_after(1000, 1005, sequences=(seen(1), seen(2)), **queue)

    service.core.iterations = answer
    with watching(service) as events:
        status = first(events, "status")
        rows = first(events, "rows")
    assert [sequence["id"] for sequence in rows["sequences"]] == ["request-1", "request-2"]
    assert [row["n"] for row in rows["rows"]] == [1001, 1002, 1003, 1004, 1005]
    row = rows["rows"][0]
    assert (row["lane"], row["it"], row["ms"], row["lost"]) == (7, 1001, 10, False)
    assert (row["d"], row["ds"], row["p"], row["ps"], row["pl"], row["l"]) == ([3], [1], [0], [2], [9], [])
    assert status["lanes"][0]["name"] == "gpu-0" and status["lanes"][0]["blocks_referenced"] == 30
    assert status["num_waiting"] == {"seats": 1}
    assert status["waiting"][0] == {
        "s": 5, "id": "request-5", "index": 0, "tenant": "", "prompt": 5, "reason": "seats", "waited": 1.5,
        "preemptions": 1, "generated": 4,
    }  # fmt: skip
    assert status["blocks"] == [{"epoch": 7, "step": 2, "states": "0231", "s": [NOBODY, 1, 2, NOBODY]}]
    assert status["counters"] == {"iterations": 12.0} and status["latency"]["ttft"]["counts"] == [1.0, 2.0, 3.0]


def test_the_core_is_asked_only_while_somebody_watches(service: Service) -> None:
    service.core.iterations = lambda asked: rows_after(asked.after, max(3, asked.after))
    until_nobody_watches(service)
    service.core.watches.clear()
    with watching(service) as events:
        first(events, "rows")
        wait_until(lambda: len(service.core.watches) >= 3)
        assert service.core.watches[0].after == 0 and service.core.watches[-1].after == 3
    until_nobody_watches(service)


def test_no_more_than_so_many_watch(service: Service) -> None:
    service.core.iterations = lambda asked: rows_after(asked.after, max(3, asked.after))
    with ExitStack() as stack:
        viewers = [stack.enter_context(watching(service)) for _ in range(MAX_VIEWERS)]
        assert all(first(viewer, "rows") for viewer in viewers)
        answer = service.get("/dashboard/events")
        assert error_of(answer, 503)["code"] == "too_many_viewers" and answer.headers["retry-after"] == "10"

    def is_free() -> bool:
        with httpx.stream("GET", service.url + "/dashboard/events") as answer:
            return answer.status_code == 200

    wait_until(is_free)


def test_the_streams_end_when_the_service_stops(service: Service) -> None:
    with watching(service) as events:
        first(events, "status")
        service.core.stopping = True
        assert list(events) is not None  # it ends
    assert error_of(service.get("/dashboard/events"), 503)["code"] == "shutting_down"


def test_with_keys_the_page_is_open_and_its_data_is_each_tenants_own(tmp_path: Path) -> None:
    path, acme = tmp_path / "keys.jsonl", new_secret()
    add_key(path, ApiKey(id="a", tenant="acme", sha256=fingerprint_of(acme).hex()))
    with run_service(tmp_path, "--api-keys", str(path), key=acme) as service:
        names = (seen(1, "acme"), seen(2, "other"))
        waiting = tuple(SeenWaiting(name, "seats", 1.0, 7, 0) for name in names)
        service.core.iterations = lambda asked: (
            Iterations(0, asked.after, asked.after + 1, waiting=waiting)
            if asked.after
            else rows_after(0, 2, sequences=names, waiting=waiting)
        )
        for page in FILES:
            assert httpx.get(service.url + page).status_code == 200
        for closed in ("/dashboard/events", "/dashboard/request?id=x", "/dashboard/x/y.js"):
            error_of(httpx.get(service.url + closed), 401)
        with watching(service, authorization=f"Bearer {acme}") as events:
            status, rows = first(events, "status"), first(events, "rows")
        assert rows["sequences"][1] == {"s": 2} and rows["sequences"][0]["id"] == "request-1"
        assert "other" not in json.dumps([status, rows]) and "request-2" not in json.dumps([status, rows])
        assert status["waiting"][1] == {"s": 2, "reason": "seats", "waited": 1.0, "preemptions": 0}
        service.get("/dashboard/request?id=request-2")
        assert service.core.inquiries[-1].tenant == "acme"


def test_a_request_that_is_over_is_told_of_without_an_error(service: Service) -> None:
    answer = service.get("/dashboard/request?id=gone")
    assert answer.status_code == 200 and answer.json()["sequences"] == []
    assert error_of(service.get("/dashboard/request?id=a%20b"), 400)["param"] == "id"


def test_a_slow_viewer_goes_on_with_the_newest_rows() -> None:
    newest = 0

    async def ask(after: int, *, status: bool) -> Iterations:
        return rows_after(after, newest)

    async def check() -> None:
        nonlocal newest
        feed = Feed(ask)
        viewer = Viewer(feed, "", lambda: None, lambda: False)
        seen_numbers: list[int] = []

        async def catch_up(count: int) -> None:
            nonlocal newest
            newest += count
            while feed.newest < newest:
                await asyncio.sleep(0)

        def read() -> None:
            while viewer._after < feed.newest:
                for event in viewer._news():
                    if event.startswith(b"event: rows"):
                        data = json.loads(event.split(b"data: ")[1])
                        seen_numbers.extend(row["n"] for row in data["rows"])

        await catch_up(HISTORY + 10)
        read()
        assert seen_numbers == list(range(11, HISTORY + 11)), "a new viewer is shown what is kept"
        await catch_up(MAX_BEHIND + 100)
        seen_numbers.clear()
        read()
        assert seen_numbers == list(range(newest - MAX_BEHIND + 1, newest + 1)), "what it missed is left out"
        feed.leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "TURN_S", 0.0)
        asyncio.run(check())


def test_trouble_with_the_core_is_told_and_passes() -> None:
    failing = True

    async def ask(after: int, *, status: bool) -> Iterations:
        if failing:
            raise unavailable("the scheduler does not answer")
        return rows_after(after, 3)

    async def check() -> None:
        nonlocal failing
        feed = Feed(ask)
        feed.join()
        await feed.changed()
        assert feed.failure == "the scheduler does not answer"
        failing = False
        while feed.newest < 3:
            await asyncio.sleep(0.01)
        assert feed.failure == ""
        for _ in range(MAX_VIEWERS - 1):
            feed.join()
        with pytest.raises(ApiError, match="watch already"):
            feed.join()
        for _ in range(MAX_VIEWERS):
            feed.leave()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "PATIENCE_S", 0.01)
        asyncio.run(check())
