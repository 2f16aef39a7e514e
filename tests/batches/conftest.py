"""A store on each database. PostgreSQL where `GILIR_TEST_POSTGRES` names one, as `postgresql://user@host/database`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.batches.database import Database, SqliteDatabase
from scheduler_svc.batches.files import CHUNK_BYTES
from scheduler_svc.batches.records import BatchRecord, FileRecord, Status, new_id
from scheduler_svc.batches.store import Store

POSTGRES = os.environ.get("GILIR_TEST_POSTGRES", "")


def _postgres() -> Database:
    if not POSTGRES:
        pytest.skip("GILIR_TEST_POSTGRES names no server")
    psycopg = pytest.importorskip("psycopg")
    from scheduler_svc.batches.postgres import PostgresDatabase

    schema = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    joint = "&" if "?" in POSTGRES else "?"
    return PostgresDatabase(f"{POSTGRES}{joint}options=-csearch_path%3D{schema}")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    database = SqliteDatabase(tmp_path / "batches") if request.param == "sqlite" else _postgres()
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    database = SqliteDatabase(tmp_path / "batches")
    yield Store(database)
    database.close()


def put_file(store: Store, content: bytes, tenant: str = "", **fields: Any) -> FileRecord:
    """Store a whole file."""
    file = FileRecord(new_id("file-"), tenant, "input.jsonl", "batch", len(content), int(time.time()), **fields)
    store.files.begin(file)
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


@pytest.fixture
def put() -> Callable[..., FileRecord]:
    return put_file


@pytest.fixture
def begin() -> Callable[..., BatchRecord]:
    return put_batch
