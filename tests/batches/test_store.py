"""What is committed counts once, stays, and is seen by its tenant alone; on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.batches.database import Database, SqliteDatabase, StorageError, check_storage, open_database
from scheduler_svc.batches.files import ABANDONED_S, CHUNK_BYTES, RESULT_BYTES, FileInUse, Page
from scheduler_svc.batches.records import BatchRecord, Outcome, Result, Status, unanswered
from scheduler_svc.batches.store import CannotCancel, CheckedLine, Store
from tests.batches.stored import put_batch, put_file


def running(store: Store, num_lines: int, tenant: str = "", **fields: Any) -> BatchRecord:
    batch = put_batch(store, put_file(store, b"{}\n" * num_lines, tenant), **fields)
    store.add_lines(batch.id, [CheckedLine(n, f"id-{n}", 3 * (n - 1), 2) for n in range(1, num_lines + 1)])
    store.start(batch.id, num_lines, 0, "m")
    found = store.find(batch.tenant, batch.id)
    assert found is not None and found.status == Status.IN_PROGRESS and found.in_progress_at is not None
    return found


def good(text: bytes = b'{"ok":1}') -> Result:
    return Result(Outcome.COMPLETED, text, prompt_tokens=5, cached_tokens=2, completion_tokens=7)


def content(store: Store, file_id: str | None) -> list[bytes]:
    file = store.files.find("", file_id or "")
    assert file is not None and file.batch_id is not None and file.outcome is not None
    rows = store.files.results(file.batch_id, Outcome(file.outcome), -1)
    assert file.bytes == sum(len(result) + 1 for _, result in rows)
    return [result for _, result in rows]


def num_rows(database: Database, batch: BatchRecord) -> int:
    """Lines of a batch that the database still holds."""
    with database.transaction(write=False) as cursor:
        cursor.execute("SELECT COUNT(*) FROM lines WHERE batch_id = ?", (batch.id,))
        return int(cursor.fetchone()[0])


# --- files ---


def test_any_part_of_a_file_is_read_across_its_chunks(store: Store) -> None:
    data = bytes(range(256)) * (CHUNK_BYTES // 256 * 2) + b"tail"
    file = put_file(store, data)
    for place, length in ((0, 10), (CHUNK_BYTES - 3, 7), (0, len(data)), (len(data) - 4, 100), (5, 0)):
        assert store.files.read(file.id, place, length) == data[place : place + length]


def test_the_lines_of_a_file_have_their_places_however_they_lie_across_chunks(store: Store) -> None:
    lines = [b"a", b"", b"x" * (CHUNK_BYTES - 2), b"y" * (2 * CHUNK_BYTES), b"last"]
    data = b"\n".join(lines)
    found = list(store.files.lines(put_file(store, data).id, len(data), 3 * CHUNK_BYTES))
    assert [line for _, line in found] == lines
    assert all(data[place : place + len(line)] == line for place, line in found)
    short = [line for _, line in store.files.lines(put_file(store, data).id, len(data), 10)]
    assert [len(line) > 10 for line in short] == [False, False, True, True, False] and short[-1] == b"last"


def test_an_upload_is_seen_when_it_is_complete_and_leaves_nothing_when_it_fails(store: Store) -> None:
    file = put_file(store, b"abc", is_complete=0)
    assert store.files.find("", file.id) is None and store.files.page("", "", Page("", 10)) == []
    store.files.complete(file)
    assert store.files.find("", file.id) is not None
    failed = put_file(store, b"abc", is_complete=0)
    store.files.abandon(failed.id)
    store.files.abandon(file.id)
    assert store.files.read(failed.id, 0, 3) == b"" and store.files.read(file.id, 0, 3) == b"abc"


def test_what_a_tenant_stores_is_counted_while_it_comes_and_until_it_is_gone(store: Store) -> None:
    kept, under_way = put_file(store, b"x" * 10, tenant="me"), put_file(store, b"", tenant="me", is_complete=0)
    put_file(store, b"x" * 1000, tenant="them")
    assert store.files.stored_bytes("me") == 10 and store.files.stored_bytes("nobody") == 0
    store.files.append(under_way.id, 0, b"x" * CHUNK_BYTES)
    store.files.append(under_way.id, 1, b"x" * 5)
    assert store.files.stored_bytes("me") == 10 + CHUNK_BYTES + 5
    store.files.abandon(under_way.id)
    batch = running(store, 1, tenant="me")
    store.finish_line(batch.id, 1, good())
    store.finish(batch, Status.COMPLETED)
    assert store.files.stored_bytes("me") == 13, "answers are not what it uploaded"
    assert store.files.delete("me", kept.id) and store.files.stored_bytes("me") == 3


def test_files_expire_unless_a_batch_still_reads_them(store: Store) -> None:
    now = int(time.time())
    old, used = put_file(store, b"old", expires_at=now - 1), put_file(store, b"{}\n", expires_at=now - 1)
    put_batch(store, used)
    abandoned = put_file(store, b"half", is_complete=0)
    assert store.files.find("", old.id) is None
    assert store.files.sweep(now) == 1
    assert store.files.read(old.id, 0, 3) == b"" and store.files.read(used.id, 0, 2) == b"{}"
    assert store.files.sweep(now + ABANDONED_S + 10) == 1
    assert store.files.read(abandoned.id, 0, 4) == b""


def test_an_upload_that_nobody_prolongs_is_given_up(store: Store) -> None:
    """Whoever took it may have been killed."""
    now = int(time.time())
    left = put_file(store, b"half", tenant="me", is_complete=0, expires_at=now - 1)
    going = put_file(store, b"abc", tenant="me", is_complete=0, expires_at=now + 60)
    assert store.files.stored_bytes("me") == 3, "what was left behind takes none of the tenant's room"
    store.files.prolong(going.id, now + 1000)
    assert store.files.sweep(now + 500) == 1
    assert store.files.read(left.id, 0, 4) == b"" and store.files.read(going.id, 0, 3) == b"abc"
    for late in (
        lambda: store.files.append(left.id, 1, b"x"),
        lambda: store.files.prolong(left.id, now + 60),
        lambda: store.files.complete(left),
    ):
        with pytest.raises(StorageError, match="given up"):
            late()
    assert store.files.read(left.id, 0, 2 * CHUNK_BYTES) == b""
    store.files.complete(replace(going, expires_at=None))
    found = store.files.find("me", going.id)
    assert found is not None and found.expires_at is None


def test_a_file_is_not_deleted_under_its_batch(store: Store) -> None:
    batch = running(store, 1)
    with pytest.raises(FileInUse, match=batch.id):
        store.files.delete("", batch.input_file_id)
    store.finish_line(batch.id, 1, good())
    store.finish(batch, Status.COMPLETED)
    assert store.files.delete("", batch.input_file_id) and not store.files.delete("", batch.input_file_id)


def test_a_tenant_sees_only_its_own(store: Store) -> None:
    mine, theirs = put_file(store, b"x", tenant="me"), put_file(store, b"x", tenant="them")
    batch = put_batch(store, theirs)
    assert store.files.find("me", theirs.id) is None and not store.files.delete("me", theirs.id)
    assert [file.id for file in store.files.page("me", "", Page("", 10))] == [mine.id]
    assert store.find("me", batch.id) is None and store.page("me", Page("", 10)) == []
    assert store.cancel("me", batch.id) is None
    found = store.find("them", batch.id)
    assert found is not None and found.status == Status.VALIDATING


def test_lists_come_in_pages_in_both_directions(store: Store) -> None:
    files = [put_file(store, b"x") for _ in range(5)]
    ids = [file.id for file in files]
    assert [file.id for file in store.files.page("", "batch", Page("", 2))] == ids[:1:-1]
    assert [file.id for file in store.files.page("", "", Page(ids[3], 10))] == ids[2::-1]
    assert [file.id for file in store.files.page("", "", Page(ids[1], 10, ascending=True))] == ids[2:]
    assert store.files.page("", "batch_output", Page("", 2)) == []
    batches = [put_batch(store, files[0]).id for _ in range(3)]
    assert [batch.id for batch in store.page("", Page(batches[2], 1))] == [batches[1], batches[0]]


# --- lines ---


def test_a_line_counts_once(store: Store) -> None:
    batch = running(store, 3)
    assert store.finish_line(batch.id, 2, good(b"first"))
    assert not store.finish_line(batch.id, 2, good(b"second"))
    assert [line.number for line in store.pending(batch.id, 0, 10)] == [1, 3]
    assert [line.number for line in store.pending(batch.id, 1, 10)] == [3]
    found = store.find("", batch.id)
    assert found is not None
    assert found.describe()["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    usage = found.describe()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 7, 12)
    assert store.count_lines() == {"waiting": 2, "completed": 1, "failed": 0}


def test_a_completed_batch_has_its_results_in_the_order_of_the_input(store: Store) -> None:
    batch = running(store, 3, output_expires_s=3600)
    for number, result in ((3, good(b"three")), (1, good(b"one")), (2, Result(Outcome.FAILED, b"bad"))):
        store.finish(batch, Status.COMPLETED)
        assert store.finish_line(batch.id, number, result), "a batch is completed with its last line, not before"
    store.finish(batch, Status.COMPLETED)
    store.finish(batch, Status.CANCELLED)
    found = store.find("", batch.id)
    assert found is not None and found.status == Status.COMPLETED and found.completed_at is not None
    assert found.cancelled_at is None and store.live() == []
    assert content(store, found.output_file_id) == [b"one", b"three"]
    assert content(store, found.error_file_id) == [b"bad"]
    output = store.files.find("", found.output_file_id or "")
    assert output is not None and output.expires_at == output.created_at + 3600
    assert output.purpose == "batch_output"
    with pytest.raises(CannotCancel, match="completed"):
        store.cancel("", batch.id)


def test_large_results_are_read_a_few_at_a_time(store: Store) -> None:
    batch = running(store, 5)
    texts = [b"a" * (RESULT_BYTES // 2), b"b" * (RESULT_BYTES // 2), b"c" * (2 * RESULT_BYTES), b"d", b"e"]
    for number, text in enumerate(texts, 1):
        store.finish_line(batch.id, number, good(text))
    pages, last = [], -1
    while page := store.files.results(batch.id, Outcome.COMPLETED, last):
        pages.append([result for _, result in page])
        last = page[-1][0]
    assert pages == [texts[:2], texts[2:3], texts[3:]]


def test_a_deleted_output_file_takes_its_lines_along_and_the_counts_stay(store: Store, database: Database) -> None:
    batch = running(store, 2)
    store.finish_line(batch.id, 1, good())
    store.finish_line(batch.id, 2, Result(Outcome.FAILED, b"bad"))
    store.finish(batch, Status.COMPLETED)
    found = store.find("", batch.id)
    assert found is not None and found.output_file_id is not None and found.error_file_id is not None
    assert store.files.delete("", found.output_file_id)
    assert store.files.results(batch.id, Outcome.COMPLETED, -1) == []
    assert content(store, found.error_file_id) == [b"bad"] and num_rows(database, batch) == 1
    assert store.files.delete("", found.error_file_id) and num_rows(database, batch) == 0
    assert store.find("", batch.id) == found and found.describe()["request_counts"]["completed"] == 1
    assert store.count_lines() == {"waiting": 0, "completed": 1, "failed": 1}


def test_lines_go_when_the_files_that_show_them_expire(store: Store, database: Database) -> None:
    batch = running(store, 2, output_expires_s=3600)
    store.finish_line(batch.id, 1, good())
    store.finish(batch, Status.CANCELLED)
    assert num_rows(database, batch) == 1, "the line that did not run has gone with the batch's end"
    store.sweep(time.time())
    assert num_rows(database, batch) == 1
    store.sweep(time.time() + 3700)
    assert num_rows(database, batch) == 0
    assert store.count_lines() == {"waiting": 0, "completed": 1, "failed": 0}


def test_lines_that_older_versions_left_are_swept(store: Store, database: Database) -> None:
    batch, live = running(store, 3), running(store, 2)
    store.finish_line(batch.id, 1, good())
    store.finish_line(batch.id, 2, Result(Outcome.FAILED, b"bad"))
    store.finish(batch, Status.CANCELLED)
    store.finish_line(live.id, 1, good())
    with database.transaction() as cursor:
        cursor.execute("UPDATE lines SET result = NULL WHERE batch_id = ? AND outcome = 'completed'", (batch.id,))
    store.sweep(time.time())
    assert num_rows(database, batch) == 1 and num_rows(database, live) == 2
    assert [line.number for line in store.pending(live.id, 0, 10)] == [2]


def test_what_has_not_run_when_a_batch_expires_is_told_in_the_error_file(store: Store) -> None:
    batch = running(store, 3)
    store.finish_line(batch.id, 2, good(b"done"))
    store.finish(batch, Status.EXPIRED)
    assert not store.finish_line(batch.id, 1, good(b"too late"))
    found = store.find("", batch.id)
    assert found is not None and found.status == Status.EXPIRED and found.expired_at is not None
    assert content(store, found.output_file_id) == [b"done"]
    errors = [json.loads(line) for line in content(store, found.error_file_id)]
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [
        ("id-1", "batch_expired"),
        ("id-3", "batch_expired"),
    ]
    assert found.describe()["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


def test_a_cancelled_batch_keeps_what_was_done(store: Store) -> None:
    batch = running(store, 3)
    store.finish_line(batch.id, 1, good(b"one"))
    cancelling = store.cancel("", batch.id)
    assert cancelling is not None and cancelling.status == Status.CANCELLING and cancelling.cancelling_at is not None
    assert store.cancel("", batch.id) == cancelling
    assert store.finish_line(batch.id, 2, good(b"two")), "it was under way"
    store.finish(batch, Status.CANCELLED)
    assert not store.finish_line(batch.id, 3, good(b"three"))
    found = store.find("", batch.id)
    assert found is not None and found.status == Status.CANCELLED and found.error_file_id is None
    assert content(store, found.output_file_id) == [b"one", b"two"]
    assert store.count_lines() == {"waiting": 0, "completed": 2, "failed": 0}


def test_a_file_that_cannot_be_used_fails_the_batch(store: Store) -> None:
    batch = put_batch(store, put_file(store, b"{"))
    bad = unanswered(batch.id, 1, None, "invalid_json", "no")
    store.add_lines(batch.id, [CheckedLine(1, None, 0, 1, bad)])
    store.fail(batch.id, [{"code": "invalid_json", "line": 1, "message": "no", "param": None}])
    found = store.find("", batch.id)
    assert found is not None and found.status == Status.FAILED and found.failed_at is not None
    assert found.describe()["errors"]["data"][0]["line"] == 1
    assert store.files.results(batch.id, Outcome.FAILED, -1) == []
    store.start(batch.id, 1, 0, None)
    assert store.live() == []


def test_an_error_within_a_transaction_undoes_it(store: Store, database: Database) -> None:
    file = put_file(store, b"x")
    with pytest.raises(StorageError), database.transaction() as cursor:
        cursor.execute("UPDATE files SET bytes = 100 WHERE id = ?", (file.id,))
        cursor.execute("SELECT nonsense FROM nowhere")
    with pytest.raises(KeyError), database.transaction() as cursor:
        cursor.execute("UPDATE files SET bytes = 100 WHERE id = ?", (file.id,))
        raise KeyError
    found = store.files.find("", file.id)
    assert found is not None and found.bytes == 1


def test_a_database_of_an_older_version_gets_the_indexes_when_it_is_opened(store: Store, database: Database) -> None:
    indexes = ("files_tenant", "batches_tenant", "lines_open")
    for _ in range(2):
        batch = running(store, 1)
        with database.transaction() as cursor:
            for index in indexes:
                cursor.execute(f"DROP INDEX {index}")  # an error where it is not there
        database.close()
    assert store.find("", batch.id) == batch


# --- SQLite ---


def test_what_was_committed_is_there_for_the_next_process_and_for_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    check_storage(folder, None)
    first = SqliteDatabase(folder)
    file = put_file(Store(first), b"kept")
    first.close()
    assert Store(open_database(folder, None)).files.read(file.id, 0, 10) == b"kept"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_new_files_leave_room_for_results_and_deletions(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, used = 200 << 20, 1 << 20
    small = SimpleNamespace(f_frsize=1, f_blocks=blocks, f_bavail=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _path: small)
    store, kept = sqlite_store, put_file(sqlite_store, b"x" * used)
    batch = running(store, 1)
    small.f_bavail = blocks // 10 + used // 2
    store.files.append(kept.id, 4, b"x")
    with pytest.raises(StorageError, match="nearly full"):
        put_file(store, b"x" * used)
    small.f_bavail = 0
    with pytest.raises(StorageError, match="nearly full"):
        put_batch(store, kept)
    assert store.finish_line(batch.id, 1, good()) and store.files.delete("", kept.id)
    small.f_bavail = blocks // 10
    put_file(store, b"x" * (used // 2))  # the room of what was deleted


def test_one_runner_at_a_time(database: Database, tmp_path: Path) -> None:
    assert database.lock_runner() and database.lock_runner()
    if isinstance(database, SqliteDatabase):
        other = SqliteDatabase(tmp_path / "batches")
        assert not other.lock_runner()
        database.close()
        assert other.lock_runner()
        other.close()


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        check_storage(tmp_path / "file", None)
    (tmp_path / "batches.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(ValueError, match="database"):
        check_storage(tmp_path, None)
