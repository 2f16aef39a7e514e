"""Reads a batch's input file into lines, a page at a time so that other batches' lines go on meanwhile."""

from __future__ import annotations

from itertools import islice

import structlog

from scheduler_svc.batches.input import InputFile
from scheduler_svc.batches.records import BatchRecord
from scheduler_svc.batches.store import Store
from scheduler_svc.batches.store_thread import StoreThread

log = structlog.get_logger()

PAGE = 256


async def check_input(thread: StoreThread, batch: BatchRecord, max_line_bytes: int) -> None:
    """The batch is in progress, or failed, when this returns. It may be cancelled and begun anew at any point."""
    if not await thread.run(Store.forget_lines, batch.id):
        return  # `batch` is older than the end of the check before
    file = await thread.run(lambda store: store.files.find(batch.tenant, batch.input_file_id))
    if file is None:
        text = "The input file has been deleted or has expired."
        await thread.run(Store.fail, batch.id, [{"code": "no_file", "line": None, "message": text, "param": None}])
        return
    source = InputFile(batch.id, batch.endpoint, max_line_bytes)
    size = file.bytes
    lines = await thread.run(lambda store: source.check(store.files.lines(batch.input_file_id, size, max_line_bytes)))

    def store_page(store: Store) -> int:
        page = list(islice(lines, PAGE))
        store.add_lines(batch.id, page)
        return len(page)

    while await thread.run(store_page):
        pass
    failure = source.failure()
    if failure:
        log.warning("batch failed", batch=batch.id, code=failure[0]["code"])
        await thread.run(Store.fail, batch.id, failure)
        return
    log.info("batch begins", batch=batch.id, lines=source.total, bad_lines=source.failed)
    await thread.run(Store.start, batch.id, source.total, source.failed, source.model)
