"""The tables and indexes. Names of both databases' types that differ are filled in. A database that was made before an
index was thought of gets it when it is opened.

Ids begin with their time of creation, so the order of ids is the order of creation.
"""

from __future__ import annotations

_STATEMENTS = (
    # is_complete: 0 while it is being uploaded. batch_id and outcome: an output or error file, whose content is the
    # results of that batch's lines; all others have theirs in `chunks`.
    """CREATE TABLE IF NOT EXISTS files (
        id TEXT{collate} PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
        bytes BIGINT NOT NULL, created_at BIGINT NOT NULL, expires_at BIGINT, is_complete INTEGER NOT NULL,
        batch_id TEXT, outcome TEXT)""",
    "CREATE INDEX IF NOT EXISTS files_tenant ON files (tenant, id)",
    """CREATE TABLE IF NOT EXISTS chunks (
        file_id TEXT{collate} NOT NULL, number BIGINT NOT NULL, data {blob} NOT NULL, PRIMARY KEY (file_id, number))""",
    """CREATE TABLE IF NOT EXISTS batches (
        id TEXT{collate} PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT, model TEXT, errors TEXT,
        output_expires_s BIGINT, output_file_id TEXT, error_file_id TEXT,
        created_at BIGINT NOT NULL, expires_at BIGINT NOT NULL, in_progress_at BIGINT, finalizing_at BIGINT,
        completed_at BIGINT, failed_at BIGINT, expired_at BIGINT, cancelling_at BIGINT, cancelled_at BIGINT,
        total BIGINT NOT NULL DEFAULT 0, completed BIGINT NOT NULL DEFAULT 0, failed BIGINT NOT NULL DEFAULT 0,
        prompt_tokens BIGINT NOT NULL DEFAULT 0, cached_tokens BIGINT NOT NULL DEFAULT 0,
        completion_tokens BIGINT NOT NULL DEFAULT 0, key_id TEXT NOT NULL DEFAULT '')""",
    "CREATE INDEX IF NOT EXISTS batches_status ON batches (status)",
    "CREATE INDEX IF NOT EXISTS batches_tenant ON batches (tenant, id)",
    # place and length: of the line in the input file, in bytes. outcome: NULL until it is done. result: the line that
    # the output or error file has for it. A row is kept while its batch may run it, or a file shows its result.
    """CREATE TABLE IF NOT EXISTS lines (
        batch_id TEXT{collate} NOT NULL, number BIGINT NOT NULL, custom_id TEXT, place BIGINT NOT NULL,
        length BIGINT NOT NULL, outcome TEXT, result {blob}, PRIMARY KEY (batch_id, number))""",
    "CREATE INDEX IF NOT EXISTS lines_open ON lines (batch_id) WHERE result IS NULL",
)


def statements(blob: str, collate: str) -> list[str]:
    """What makes tables and indexes, with a database's words for binary values and for comparing text byte by byte."""
    return [statement.format(blob=blob, collate=collate) for statement in _STATEMENTS]
