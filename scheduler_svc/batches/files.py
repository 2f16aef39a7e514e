"""Files in the database. Their contents lie in chunks beside them: so one backup, one commit and one place to look."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.batches.database import Cursor, Database, StorageError
from scheduler_svc.batches.records import FILE_COLUMNS, LIVE, FileRecord, Outcome

CHUNK_BYTES = 256 << 10
"""All chunks of a file but its last have this size, so a place in it is found by division."""
ABANDONED_S = 86_400
"""An upload that is not complete after so long never will be, also where nothing says how long it may take."""
RESULTS, RESULT_BYTES = 64, 1 << 20
"""Results that are read at a time: so many, and no more than one beyond so many bytes."""

_VISIBLE = "tenant = ? AND is_complete = 1 AND (expires_at IS NULL OR expires_at > ?)"


class FileInUse(Exception):
    """A batch still needs the file."""


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for. `after`: the last id of the part before, or empty."""

    after: str
    limit: int
    ascending: bool = False

    @property
    def condition(self) -> str:
        """With one value: `after`, twice."""
        return f"(? = '' OR id {'>' if self.ascending else '<'} ?)"

    @property
    def order(self) -> str:
        """With one value: a limit that tells whether there is more."""
        return f"ORDER BY id {'ASC' if self.ascending else 'DESC'} LIMIT ?"


class Files:
    """The tables `files` and `chunks`. Every question names the tenant, who sees only its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- upload ---

    def begin(self, file: FileRecord, announced: int = 0) -> None:
        """An upload of about so many bytes has begun; nobody sees it before `complete`.

        Until then `expires_at` tells when it is given up, unless `prolong` says later: who took it may have died.
        """
        self._database.check_room(announced)
        with self._database.transaction() as cursor:
            insert_file(cursor, file)

    def append(self, file_id: str, first: int, data: bytes) -> None:
        """Add content: whole chunks, or the rest. `first`: number of the first chunk. It counts in `stored_bytes`."""
        rows = [
            (file_id, first + i, data[place : place + CHUNK_BYTES])
            for i, place in enumerate(range(0, len(data), CHUNK_BYTES))
        ]
        self._database.check_room(len(data))
        with self._database.transaction() as cursor:
            cursor.executemany("INSERT INTO chunks (file_id, number, data) VALUES (?, ?, ?)", rows)
            cursor.execute("UPDATE files SET bytes = ? WHERE id = ?", (first * CHUNK_BYTES + len(data), file_id))
            _check_there(cursor)

    def prolong(self, file_id: str, until: int) -> None:
        """The upload is still under way."""
        with self._database.transaction() as cursor:
            cursor.execute("UPDATE files SET expires_at = ? WHERE id = ? AND is_complete = 0", (until, file_id))
            _check_there(cursor)

    def complete(self, file: FileRecord) -> None:
        """All content is there: from now on the file is seen."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE files SET filename = ?, purpose = ?, bytes = ?, expires_at = ?, is_complete = 1 WHERE id = ?",
                (file.filename, file.purpose, file.bytes, file.expires_at, file.id),
            )
            _check_there(cursor)

    def abandon(self, file_id: str) -> None:
        """The upload failed."""
        with self._database.transaction() as cursor:
            _delete(cursor, "id = ? AND is_complete = 0", (file_id,))

    # --- questions ---

    def stored_bytes(self, tenant: str) -> int:
        """Of all files that a tenant has uploaded, and of what has come of those under way."""
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                "SELECT SUM(bytes) FROM files WHERE tenant = ? AND batch_id IS NULL"
                " AND (is_complete = 1 OR expires_at IS NULL OR expires_at > ?)",
                (tenant, int(time.time())),
            )
            return int(cursor.fetchone()[0] or 0)

    def find(self, tenant: str, file_id: str) -> FileRecord | None:
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                f"SELECT {FILE_COLUMNS} FROM files WHERE {_VISIBLE} AND id = ?", (tenant, int(time.time()), file_id)
            )
            row = cursor.fetchone()
        return None if row is None else FileRecord(*row)

    def page(self, tenant: str, purpose: str, part: Page) -> list[FileRecord]:
        """One more than the limit when there are more."""
        sql = f"SELECT {FILE_COLUMNS} FROM files WHERE {_VISIBLE} AND (? = '' OR purpose = ?)"
        values = (tenant, int(time.time()), purpose, purpose, part.after, part.after, part.limit + 1)
        with self._database.transaction(write=False) as cursor:
            cursor.execute(f"{sql} AND {part.condition} {part.order}", values)
            return [FileRecord(*row) for row in cursor.fetchall()]

    def delete(self, tenant: str, file_id: str) -> bool:
        """Whether there was one. Raises `FileInUse`."""
        with self._database.transaction() as cursor:
            marks = ", ".join("?" for _ in LIVE)
            cursor.execute(
                f"SELECT id FROM batches WHERE tenant = ? AND input_file_id = ? AND status IN ({marks})",
                (tenant, file_id, *LIVE),
            )
            used_by = cursor.fetchone()
            if used_by is not None:
                raise FileInUse(used_by[0])
            return _delete(cursor, f"{_VISIBLE} AND id = ?", (tenant, int(time.time()), file_id)) > 0

    def sweep(self, now: float) -> int:
        """Delete files that have expired and uploads that were abandoned. Returns how many."""
        with self._database.transaction() as cursor:
            unused = "id NOT IN (SELECT input_file_id FROM batches WHERE status IN (?, ?, ?))"
            count = _delete(cursor, f"expires_at <= ? AND {unused}", (int(now), *LIVE))
            return count + _delete(cursor, "is_complete = 0 AND created_at < ?", (int(now) - ABANDONED_S,))

    # --- content ---

    def read(self, file_id: str, place: int, length: int) -> bytes:
        """A part of an uploaded file; shorter at its end."""
        if length <= 0:
            return b""
        first, last = place // CHUNK_BYTES, (place + length - 1) // CHUNK_BYTES
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                "SELECT data FROM chunks WHERE file_id = ? AND number BETWEEN ? AND ? ORDER BY number",
                (file_id, first, last),
            )
            data = b"".join(bytes(row[0]) for row in cursor.fetchall())
        start = place - first * CHUNK_BYTES
        return data[start : start + length]

    def results(self, batch_id: str, outcome: Outcome, after: int) -> list[tuple[int, bytes]]:
        """The next results of a batch, by number of line: what an output or error file is made of."""
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                "SELECT number, LENGTH(result) FROM lines WHERE batch_id = ? AND outcome = ? AND number > ?"
                " ORDER BY number LIMIT ?",
                (batch_id, outcome, after, RESULTS),
            )
            last, size = after, 0
            for number, length in cursor.fetchall():
                last, size = number, size + length
                if size >= RESULT_BYTES:
                    break
            cursor.execute(
                "SELECT number, result FROM lines WHERE batch_id = ? AND outcome = ? AND number > ? AND number <= ?"
                " ORDER BY number",
                (batch_id, outcome, after, last),
            )
            return [(number, bytes(result)) for number, result in cursor.fetchall()]

    def lines(self, file_id: str, size: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """All lines of an uploaded file with their places, without line breaks, one at a time in memory.

        Of a line that is longer than `max_bytes` only the beginning is given, so much that it can be told.
        """
        line, place, length = bytearray(), 0, 0
        for start in range(0, size, CHUNK_BYTES):
            pieces = self.read(file_id, start, CHUNK_BYTES).split(b"\n")
            for i, piece in enumerate(pieces):
                if i:
                    yield place, bytes(line)
                    place, length = place + length + 1, 0
                    line.clear()
                length += len(piece)
                if len(line) <= max_bytes:
                    line += piece
        if line:
            yield place, bytes(line)


def _check_there(cursor: Cursor) -> None:
    """Raise `StorageError`, which undoes the transaction, where the upload was given up meanwhile."""
    if not cursor.rowcount:
        raise StorageError("the upload was given up")


def insert_file(cursor: Cursor, file: FileRecord) -> None:
    row = file.row()
    cursor.execute(f"INSERT INTO files ({FILE_COLUMNS}) VALUES ({', '.join('?' for _ in row)})", row)


def _delete(cursor: Cursor, condition: str, values: tuple[object, ...]) -> int:
    """Delete files with their contents: chunks, or the results that they show. Returns how many."""
    cursor.execute(f"SELECT id, batch_id, outcome FROM files WHERE {condition}", values)
    rows = cursor.fetchall()
    for file_id, batch_id, outcome in rows:
        cursor.execute("DELETE FROM chunks WHERE file_id = ?", (file_id,))
        if batch_id is not None:
            # Only a batch that has ended has such a file; what it counts stands in its own row.
            cursor.execute("DELETE FROM lines WHERE batch_id = ? AND outcome = ?", (batch_id, outcome))
        cursor.execute("DELETE FROM files WHERE id = ?", (file_id,))
    return len(rows)
