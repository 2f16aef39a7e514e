"""Runs the lines of batches in the seats that nobody else needs."""

from __future__ import annotations

import asyncio
import os
import time

import structlog

from scheduler_svc.batch_runner.answering import LineAnswer, answer_request
from scheduler_svc.batch_runner.checking import check_input
from scheduler_svc.batch_runner.idle_seats import IdleSeats
from scheduler_svc.batch_runner.live_batch import PAGE, LiveBatch
from scheduler_svc.batch_runner.models_seen import ModelsSeen
from scheduler_svc.batch_runner.rota import Rota
from scheduler_svc.batch_runner.settings import RunnerSettings
from scheduler_svc.batches.database import StorageError
from scheduler_svc.batches.input import read_line
from scheduler_svc.batches.records import BatchRecord, Line, Outcome, Result, Status, answered
from scheduler_svc.batches.store import Store
from scheduler_svc.batches.store_thread import StoreThread
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.http.body import parse_fields
from scheduler_svc.http.errors import ApiError, internal, unavailable
from scheduler_svc.http.fields import Fields

log = structlog.get_logger()

LOOK_S = 0.5
"""How often the database is asked what there is to do."""
TURN_S = 0.1
"""How often idle seats are looked for while there is something to run."""
RETRY_S = 2.0
"""Pause after the database could not be used."""
SWEEP_S = 600.0
TRANSIENT = (429, 503, 504)
"""Statuses that say nothing of the line itself. 504: its batch is about to expire, which says so better."""


class Runner:
    """`run` until `stop`. A line counts when its result is committed; all that was in flight is run again."""

    def __init__(self, settings: RunnerSettings, frontend: Frontend, thread: StoreThread) -> None:
        self._settings, self._frontend, self._thread = settings, frontend, thread
        self._batches: dict[str, LiveBatch] = {}
        self._rota = Rota()
        self._seats = IdleSeats(settings.batch_max_in_flight)
        self._models = ModelsSeen(settings.batch_model_wait_s)
        self._wake = asyncio.Event()
        self._stopping = False
        self._parent = os.getppid()
        self._look_at = self._sweep_at = 0.0

    def stop(self) -> None:
        """Give up what is in flight and return from `run`."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        if await self._become_the_runner():
            while not self._is_over():
                await self._turn()
        for batch in self._batches.values():
            await batch.stop()

    def _is_over(self) -> bool:
        return self._stopping or os.getppid() != self._parent

    async def _become_the_runner(self) -> bool:
        told = False
        while not self._is_over():
            try:
                if await self._thread.run(Store.lock_runner):
                    return True
                if not told:
                    log.warning("another scheduler runs the batches of this database: waiting")
                told = True
            except StorageError as error:
                log.error("the batches' database cannot be used", error=str(error))
            await self._rest(RETRY_S)
        return False

    async def _rest(self, seconds: float) -> None:
        """Until something has happened, or the time is over."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return
        self._wake.clear()

    async def _turn(self) -> None:
        now = time.monotonic()
        self._models.look(self._frontend.models, now)
        if self._frontend.stopping:
            # The lines are to be run again by the next scheduler; this one need not wait for them.
            for batch in self._batches.values():
                await batch.stop()
            await self._rest(LOOK_S)
            return
        try:
            if now >= self._look_at:
                self._look_at = now + LOOK_S
                await self._look()
            await self._fill(now)
        except StorageError as error:
            log.error("the batches' database cannot be used", error=str(error))
            await self._rest(RETRY_S)
            return
        await self._rest(TURN_S if self._batches else LOOK_S)

    # --- batches ---

    async def _look(self) -> None:
        """See which batches there are, and do what their states ask for."""
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_S
            await self._thread.run(Store.sweep, time.time())
        records = {record.id: record for record in await self._thread.run(Store.live)}
        for batch_id in self._batches.keys() - records.keys():
            await self._batches.pop(batch_id).stop()
        for record in records.values():
            batch = self._batches.setdefault(record.id, LiveBatch(record))
            batch.record = record
            await self._advance(batch)
        self._rota.update((batch.record.id, batch.record.tenant) for batch in self._batches.values())

    async def _advance(self, batch: LiveBatch) -> None:
        record = batch.record
        if record.status == Status.CANCELLING:
            await self._end(batch, Status.CANCELLED)
        elif record.expires_at <= time.time():
            await self._end(batch, Status.EXPIRED)
        elif record.status == Status.VALIDATING:
            if batch.checking is None or batch.checking.done():
                batch.checking = asyncio.create_task(self._check(record))
        elif batch.is_done:
            await self._end(batch, Status.COMPLETED)

    async def _check(self, record: BatchRecord) -> None:
        try:
            await check_input(self._thread, record, self._settings.max_body_bytes)
        except StorageError as error:
            log.error("the batches' database cannot be used", error=str(error))
        except Exception:
            log.exception("batch could not be checked", batch=record.id)
            text = "The server had an error while it read the file."
            error_object = {"code": "internal_error", "line": None, "message": text, "param": None}
            await self._thread.run(Store.fail, record.id, [error_object])
        self._look_at = 0.0
        self._wake.set()

    async def _end(self, batch: LiveBatch, status: Status) -> None:
        await batch.stop()
        await self._thread.run(Store.forget_lines, batch.record.id)
        await self._thread.run(Store.finish, batch.record, status)
        del self._batches[batch.record.id]
        log.info("batch ended", batch=batch.record.id, status=status.value)

    # --- lines ---

    async def _fill(self, now: float) -> None:
        """Start lines while there are idle seats."""
        for batch in self._batches.values():
            if batch.needs_lines:
                batch.add(await self._thread.run(Store.pending, batch.record.id, batch.last_number, PAGE))
                self._look_at = 0.0 if batch.is_done else self._look_at
        while True:
            num_lines = sum(len(batch.running) for batch in self._batches.values())
            own = max(num_lines, self._frontend.link.num_streams)
            if own >= self._seats.room(self._frontend.link.stats, self._frontend.link.num_streams):
                return
            batch_id = self._rota.next(lambda name: name in self._batches and self._batches[name].is_ready(now))
            if batch_id is None:
                return
            batch = self._batches[batch_id]
            line = batch.take()
            batch.running[line.number] = asyncio.create_task(self._run(batch, line))

    async def _run(self, batch: LiveBatch, line: Line) -> None:
        try:
            result = await self._result(batch.record, line)
            await self._commit(batch.record.id, line, result)
            batch.went_well()
        except (ApiError, StorageError) as error:
            wait = error.headers.get("retry-after", "0") if isinstance(error, ApiError) else "0"
            log.debug("line put back", batch=batch.record.id, line=line.number, reason=str(error))
            batch.put_back(line, time.monotonic(), float(wait) if wait.isdecimal() else 0.0)
        except asyncio.CancelledError:
            batch.give_back(line)
            raise
        finally:
            del batch.running[line.number]
            if batch.is_done:
                self._look_at = 0.0
            self._wake.set()

    async def _result(self, record: BatchRecord, line: Line) -> Result:
        """Run a line. Raises the `ApiError` of what may be tried again."""
        request_id = f"{record.id}-{line.number}"
        data = await self._thread.run(lambda store: store.files.read(record.input_file_id, line.place, line.length))
        try:
            body = read_line(parse_fields(data), record.endpoint)
            answer, usage = await self._answer(record, body, request_id)
        except ApiError as error:
            if error.status in TRANSIENT:
                raise
            failure = answered(record.id, line.number, line.custom_id, request_id, error.status, error.body)
            return Result(Outcome.FAILED, failure)
        return Result(
            Outcome.COMPLETED,
            answered(record.id, line.number, line.custom_id, request_id, 200, answer),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
        )

    async def _answer(self, record: BatchRecord, body: Fields, request_id: str) -> LineAnswer:
        try:
            left_s = record.expires_at - time.time()
            return await answer_request(self._frontend, record, body, request_id, left_s)
        except ApiError as error:
            # Its executors may be about to attach, as after a restart, or be swapped for another model's.
            if error.code == "model_not_found" and self._models.may_come(str(body.raw("model")), time.monotonic()):
                raise unavailable(error.message, "model_not_found") from error
            raise
        except Exception:
            log.exception("line failed", request_id=request_id)
            raise internal() from None

    async def _commit(self, batch_id: str, line: Line, result: Result) -> None:
        """Until it is done: an answer that was computed is not thrown away because the disk is full."""
        while True:
            try:
                await self._thread.run(Store.finish_line, batch_id, line.number, result)
                return
            except StorageError as error:
                log.error("a result cannot be stored: trying again", batch=batch_id, error=str(error))
                await asyncio.sleep(RETRY_S)
