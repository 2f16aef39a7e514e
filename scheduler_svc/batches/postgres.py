"""PostgreSQL through psycopg. Everything is in the database, file contents too, so that any host can take over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from scheduler_svc.batches.database import Cursor, StorageError
from scheduler_svc.batches.schema import statements

CONNECT_S = 5
LOST_MS = 10_000
"""Silence of the server's host after which the connection is given up."""
RUNNER_LOCK, SCHEMA_LOCK = 0x67696C6972, 0x67696C6973
"""Keys of advisory locks."""


class PostgresDatabase:
    """Connects at the first use, and again after an error."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._is_runner = False

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        connection = psycopg.connect(
            self._url, connect_timeout=CONNECT_S, tcp_user_timeout=LOST_MS, application_name="gilir"
        )
        try:
            connection.autocommit = True
            # Two processes that create the same table at a time disturb each other. Each statement is a transaction:
            # one that held several tables' locks could wait for a writer that waits for it.
            connection.execute("SELECT pg_advisory_lock(%s)", (SCHEMA_LOCK,))
            for statement in statements("BYTEA", ' COLLATE "C"'):
                connection.execute(statement)
            connection.execute("SELECT pg_advisory_unlock(%s)", (SCHEMA_LOCK,))
            if self._is_runner and not self._try_lock(connection):
                raise StorageError("another runner has taken the batches over")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[Cursor]:
        try:
            if self._connection is None:
                self._connection = self._connect()
            with self._connection.transaction(), self._connection.cursor() as cursor:
                yield _Translated(cursor)
        except psycopg.OperationalError as error:
            self._disconnect()
            raise StorageError(_one_line(error)) from error
        except psycopg.Error as error:
            raise StorageError(_one_line(error)) from error

    def check_room(self, num_bytes: int) -> None:
        """The server's disk is not ours to measure."""

    def lock_runner(self) -> bool:
        with self.transaction():
            assert self._connection is not None
            self._is_runner = self._try_lock(self._connection)
        return self._is_runner

    @staticmethod
    def _try_lock(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
        row = connection.execute("SELECT pg_try_advisory_lock(%s)", (RUNNER_LOCK,)).fetchone()
        return row is not None and bool(row[0])

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def close(self) -> None:
        self._disconnect()
        self._is_runner = False


class _Translated:
    """A cursor that takes `?` for a value."""

    def __init__(self, cursor: psycopg.Cursor[tuple[Any, ...]]) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> None:
        self._cursor.execute(sql.replace("?", "%s"), values)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]], /) -> None:
        self._cursor.executemany(sql.replace("?", "%s"), rows)

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()


def _one_line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
