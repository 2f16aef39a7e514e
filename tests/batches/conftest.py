"""A store on each database. PostgreSQL where `GILIR_TEST_POSTGRES` names one, as `postgresql://user@host/database`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.batches.database import Database, SqliteDatabase
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
