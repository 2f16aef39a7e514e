"""Files and batches for the tests of the store and of the runner."""

from __future__ import annotations

import time
from typing import Any

from scheduler_svc.batches.files import CHUNK_BYTES
from scheduler_svc.batches.records import BatchRecord, FileRecord, Status, new_id
from scheduler_svc.batches.store import Store


def put_file(store: Store, content: bytes, tenant: str = "", **fields: Any) -> FileRecord:
    """Store a whole file."""
    file = FileRecord(new_id("file-"), tenant, "input.jsonl", "batch", len(content), int(time.time()), **fields)
    store.files.begin(file, len(content))
    for place in range(0, len(content), CHUNK_BYTES):
        store.files.append(file.id, place // CHUNK_BYTES, content[place : place + CHUNK_BYTES])
    return file


def put_batch(store: Store, file: FileRecord, **fields: Any) -> BatchRecord:
    """Store a batch over a file, as the API makes it."""
    now = int(time.time())
    values: dict[str, Any] = {
        "id": new_id("batch_"),
        "tenant": file.tenant,
        "status": Status.VALIDATING.value,
        "endpoint": "/v1/completions",
        "input_file_id": file.id,
        "completion_window": "24h",
        "metadata": None,
        "model": None,
        "errors": None,
        "output_expires_s": None,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + 86_400,
    }
    batch = BatchRecord(**values | fields)
    store.create(batch)
    return batch
