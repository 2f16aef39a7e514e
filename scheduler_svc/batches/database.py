"""The thin layer over the two databases, SQLite (embedded) and PostgreSQL: one SQL for both, with `?` for values."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from scheduler_svc.batches.schema import statements

BUSY_S = 30.0
"""A writer waits so long for the writers of other processes."""
RESERVED_BYTES = 64 << 20
RESERVED_SHARE = 0.1
"""What new files leave free of the disk, the lesser of the two: results, and deletions too, need room to be written."""


class StorageError(Exception):
    """The database cannot be used now."""


class Cursor(Protocol):
    """What statements are given to, within a transaction. Rows are tuples; binary values are bytes."""

    @property
    def rowcount(self) -> int:
        """Rows that the last statement changed."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Any: ...
    def executemany(self, sql: str, rows: Sequence[Sequence[Any]], /) -> Any: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Database(Protocol):
    """One connection, opened at its first use. Not to be used from two threads at a time."""

    def transaction(self, *, write: bool = True) -> AbstractContextManager[Cursor]:
        """Committed, and on the disk, when it is left without an error. Raises `StorageError`."""

    def check_room(self, num_bytes: int) -> None:
        """Before something new is taken. Raises `StorageError` where it would take the room that is reserved."""

    def lock_runner(self) -> bool:
        """Become the one runner of this database, until `close` or the end of the process. False: another is."""

    def close(self) -> None: ...


def open_database(folder: Path | None, url: str | None) -> Database:
    """PostgreSQL when there is a URL, else SQLite in the folder. Raises ValueError when psycopg is missing for it."""
    if url is None:
        assert folder is not None
        return SqliteDatabase(folder)
    try:
        from scheduler_svc.batches.postgres import PostgresDatabase
    except ImportError as error:
        raise ValueError("batch-database needs psycopg: pip install -e '.[postgres]' in Gilir's folder") from error
    return PostgresDatabase(url)


def check_storage(folder: Path | None, url: str | None) -> None:
    """At the start: what cannot work is told at once. A PostgreSQL server may still be starting, and is not asked.

    Raises OSError or ValueError.
    """
    if folder is None and url is None:
        return
    database = open_database(folder, url)
    if isinstance(database, SqliteDatabase):
        try:
            database.open()
        except StorageError as error:
            raise ValueError(str(error)) from error
    database.close()


class SqliteDatabase:
    """`batches.sqlite3` in a folder that only this user enters, as it holds prompts and answers.

    Write-ahead log, so that readers never wait; synchronous=FULL, so that what was committed outlives a power cut.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        self._lock: IO[bytes] | None = None

    def open(self) -> None:
        """Make folder, file and tables. Raises OSError or `StorageError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / "batches.sqlite3"
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            # The root of a container may be read-only.
            connection.execute("PRAGMA temp_store=MEMORY")
        except sqlite3.Error as error:
            raise StorageError(f"{path}: {error}") from error
        self._connection = connection
        with self.transaction() as cursor:
            for statement in statements("BLOB", ""):
                cursor.execute(statement)

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[Cursor]:
        if self._connection is None:
            try:
                self.open()
            except OSError as error:
                raise StorageError(str(error)) from error
        assert self._connection is not None
        cursor = self._connection.cursor()
        try:
            # A transaction that began as a reader cannot always become a writer.
            cursor.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield cursor
                cursor.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    cursor.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StorageError(str(error)) from error
        finally:
            cursor.close()

    def check_room(self, num_bytes: int) -> None:
        with self.transaction(write=False) as cursor:
            cursor.execute("SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size")
            reusable = int(cursor.fetchone()[0])
        disk = os.statvfs(self._folder)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free + min(0, reusable - num_bytes) < min(RESERVED_BYTES, int(size * RESERVED_SHARE)):
            raise StorageError(f"the disk of {self._folder} is nearly full: {free >> 20} MB are left")

    def lock_runner(self) -> bool:
        if self._lock is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self._folder / "runner.lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
