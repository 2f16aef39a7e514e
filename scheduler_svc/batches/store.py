"""Batches and their lines in the database. Each method is one transaction, and can be repeated after a crash."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from scheduler_svc.batches.database import Cursor, Database
from scheduler_svc.batches.files import Files, Page, insert_file
from scheduler_svc.batches.records import (
    BATCH_COLUMNS,
    LIVE,
    BatchRecord,
    FileRecord,
    Line,
    Outcome,
    Result,
    Status,
    new_id,
    unanswered,
)

_RUNNING = (Status.IN_PROGRESS, Status.CANCELLING)
"""States in which the results of lines still count."""


class CannotCancel(Exception):
    """The batch has ended; its text is the status."""


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A line of an input file. `bad`: its result, when it is no request."""

    number: int
    custom_id: str | None
    place: int
    length: int
    bad: bytes | None = None


class Store:
    """The tables `batches` and `lines`, and through `files` the other two."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.files = Files(database)

    def close(self) -> None:
        self._database.close()

    def lock_runner(self) -> bool:
        return self._database.lock_runner()

    # --- the API's questions ---

    def create(self, batch: BatchRecord) -> None:
        row = batch.row()
        self._database.check_room(0)
        with self._database.transaction() as cursor:
            cursor.execute(f"INSERT INTO batches ({BATCH_COLUMNS}) VALUES ({', '.join('?' for _ in row)})", row)

    def find(self, tenant: str, batch_id: str) -> BatchRecord | None:
        with self._database.transaction(write=False) as cursor:
            return _find(cursor, tenant, batch_id)

    def page(self, tenant: str, part: Page) -> list[BatchRecord]:
        """One more than the limit when there are more."""
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                f"SELECT {BATCH_COLUMNS} FROM batches WHERE tenant = ? AND {part.condition} {part.order}",
                (tenant, part.after, part.after, part.limit + 1),
            )
            return [BatchRecord(*row) for row in cursor.fetchall()]

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Ask the runner to stop it. None when there is no such batch. Raises `CannotCancel` when it has ended."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE batches SET status = ?, cancelling_at = ? WHERE tenant = ? AND id = ? AND status IN (?, ?)",
                (Status.CANCELLING, int(time.time()), tenant, batch_id, Status.VALIDATING, Status.IN_PROGRESS),
            )
            batch = _find(cursor, tenant, batch_id)
        if batch is not None and batch.status not in (Status.CANCELLING, Status.CANCELLED):
            raise CannotCancel(batch.status)
        return batch

    def count_lines(self) -> dict[str, int]:
        """Lines of all batches by state: `waiting` in live ones, `completed` and `failed` in all.

        By what the batches count, so that lines count on when the rows of their results have gone with a file.
        """
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                "SELECT COALESCE(SUM(CASE WHEN status IN (?, ?, ?) THEN total - completed - failed ELSE 0 END), 0),"
                " COALESCE(SUM(completed), 0), COALESCE(SUM(failed), 0) FROM batches",
                LIVE,
            )
            waiting, completed, failed = cursor.fetchone()
        return {"waiting": int(waiting), "completed": int(completed), "failed": int(failed)}

    # --- the runner ---

    def live(self) -> list[BatchRecord]:
        """Batches that there is something to do about, oldest first."""
        with self._database.transaction(write=False) as cursor:
            cursor.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE status IN (?, ?, ?) ORDER BY id", LIVE)
            return [BatchRecord(*row) for row in cursor.fetchall()]

    def sweep(self, now: float) -> None:
        """Delete files that are over, and lines that wait although their batch has ended: such as older versions left
        when an output file was deleted.
        """
        self.files.sweep(now)
        with self._database.transaction() as cursor:
            cursor.execute(
                "DELETE FROM lines WHERE result IS NULL"
                " AND batch_id NOT IN (SELECT id FROM batches WHERE status IN (?, ?, ?))",
                LIVE,
            )

    def forget_lines(self, batch_id: str) -> bool:
        """Before its input is read, once more after a crash. False when it has been read: nothing is forgotten."""
        with self._database.transaction() as cursor:
            cursor.execute("SELECT in_progress_at FROM batches WHERE id = ?", (batch_id,))
            if cursor.fetchone() != (None,):
                return False
            cursor.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
        return True

    def add_lines(self, batch_id: str, lines: Sequence[CheckedLine]) -> None:
        rows = [
            (batch_id, line.number, line.custom_id, line.place, line.length, line.bad and Outcome.FAILED, line.bad)
            for line in lines
        ]
        with self._database.transaction() as cursor:
            cursor.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, place, length, outcome, result)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def start(self, batch_id: str, total: int, failed: int, model: str | None) -> None:
        """All its lines are there: they may be run."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE batches SET status = ?, in_progress_at = ?, total = ?, failed = ?, model = ?"
                " WHERE id = ? AND status = ?",
                (Status.IN_PROGRESS, int(time.time()), total, failed, model, batch_id, Status.VALIDATING),
            )

    def fail(self, batch_id: str, errors: list[dict[str, Any]]) -> None:
        """Its input file cannot be used at all."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "UPDATE batches SET status = ?, failed_at = ?, errors = ? WHERE id = ? AND status = ?",
                (Status.FAILED, int(time.time()), orjson.dumps(errors).decode(), batch_id, Status.VALIDATING),
            )
            cursor.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """The next lines that have no result, in the order of the file."""
        with self._database.transaction(write=False) as cursor:
            cursor.execute(
                "SELECT number, custom_id, place, length FROM lines WHERE batch_id = ? AND outcome IS NULL"
                " AND number > ? ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            )
            return [Line(*row) for row in cursor.fetchall()]

    def finish_line(self, batch_id: str, number: int, result: Result) -> bool:
        """The line is done, once and for all. False when it was already, or the batch has ended: nothing changes."""
        with self._database.transaction() as cursor:
            # The batch first: in this order two writers cannot wait for each other.
            column = "completed" if result.outcome is Outcome.COMPLETED else "failed"
            cursor.execute(
                f"UPDATE batches SET {column} = {column} + 1, prompt_tokens = prompt_tokens + ?,"
                " cached_tokens = cached_tokens + ?, completion_tokens = completion_tokens + ?"
                " WHERE id = ? AND status IN (?, ?)"
                " AND EXISTS (SELECT 1 FROM lines WHERE batch_id = ? AND number = ? AND outcome IS NULL)",
                (
                    *(result.prompt_tokens, result.cached_tokens, result.completion_tokens),
                    *(batch_id, *_RUNNING, batch_id, number),
                ),
            )
            if not cursor.rowcount:
                return False
            cursor.execute(
                "UPDATE lines SET outcome = ?, result = ? WHERE batch_id = ? AND number = ?",
                (result.outcome, result.text, batch_id, number),
            )
        return True

    def finish(self, batch: BatchRecord, status: Status) -> None:
        """End a batch as completed, expired or cancelled, and make its files of what there is.

        All in one transaction: there is no moment at which a part of it would be done twice after a crash. A batch
        with lines that have no result is never completed: it stays as it is.
        """
        now = int(time.time())
        with self._database.transaction() as cursor:
            cursor.execute(
                f"UPDATE batches SET status = ?, finalizing_at = ?, {status.value}_at = ?"
                " WHERE id = ? AND status IN (?, ?, ?)"
                " AND (0 = ? OR NOT EXISTS (SELECT 1 FROM lines WHERE batch_id = ? AND outcome IS NULL))",
                (status, now, now, batch.id, *LIVE, int(status is Status.COMPLETED), batch.id),
            )
            if not cursor.rowcount:
                return
            if status is Status.EXPIRED:
                _expire_lines(cursor, batch.id)
            names = {Outcome.COMPLETED: "output", Outcome.FAILED: "error"}
            for outcome, name in names.items():
                file_id = _make_file(cursor, batch, outcome, f"{batch.id}_{name}.jsonl", now)
                cursor.execute(f"UPDATE batches SET {name}_file_id = ? WHERE id = ?", (file_id, batch.id))
            # What has no result now will never have one.
            cursor.execute("DELETE FROM lines WHERE batch_id = ? AND outcome IS NULL", (batch.id,))


def _find(cursor: Cursor, tenant: str, batch_id: str) -> BatchRecord | None:
    cursor.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id))
    row = cursor.fetchone()
    return None if row is None else BatchRecord(*row)


def _expire_lines(cursor: Cursor, batch_id: str) -> None:
    """Lines that were not done become lines of the error file."""
    cursor.execute("SELECT number, custom_id FROM lines WHERE batch_id = ? AND outcome IS NULL", (batch_id,))
    text = "This request could not be executed before the completion window expired."
    rows = [
        (Outcome.FAILED, unanswered(batch_id, number, custom_id, "batch_expired", text), batch_id, number)
        for number, custom_id in cursor.fetchall()
    ]
    cursor.executemany("UPDATE lines SET outcome = ?, result = ? WHERE batch_id = ? AND number = ?", rows)
    cursor.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(rows), batch_id))


def _make_file(cursor: Cursor, batch: BatchRecord, outcome: Outcome, filename: str, now: int) -> str | None:
    """The file that shows the results of one outcome; None when there are none."""
    cursor.execute(
        "SELECT COUNT(*), SUM(LENGTH(result)) FROM lines WHERE batch_id = ? AND outcome = ?", (batch.id, outcome)
    )
    count, size = cursor.fetchone()
    if not count:
        return None
    file = FileRecord(
        id=new_id("file-"),
        tenant=batch.tenant,
        filename=filename,
        purpose="batch_output",
        bytes=int(size) + count,
        created_at=now,
        expires_at=None if batch.output_expires_s is None else now + batch.output_expires_s,
        batch_id=batch.id,
        outcome=outcome.value,
    )
    insert_file(cursor, file)
    return file.id
