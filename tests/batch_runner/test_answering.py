"""Under whose key the lines of a batch run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.batch_runner.answering import answer_request
from scheduler_svc.batches.records import BatchRecord
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.fields import Fields
from scheduler_svc.keys import ApiKey


class Asked(Exception):
    """The line has got as far as a generation."""


def _run(named: Callable[[str], ApiKey | None]) -> None:
    def generation(key: ApiKey) -> Any:
        raise Asked(key.id)

    frontend: Any = SimpleNamespace(
        admit=lambda: None, keys=SimpleNamespace(named=named), link=SimpleNamespace(generation=generation)
    )
    record = BatchRecord(
        "b",
        "acme",
        "in_progress",
        "/v1/completions",
        "f",
        "24h",
        *[None] * 6,
        0,
        1,
        key_id="mine",  # type: ignore[arg-type]
    )
    asyncio.run(answer_request(frontend, record, Fields({"prompt": "a"}), "r", 60.0))


def test_lines_run_under_the_key_that_made_the_batch() -> None:
    with pytest.raises(Asked, match="mine"):
        _run(lambda key_id: ApiKey(id=key_id, tenant="acme", sha256="0" * 64))


def test_lines_of_a_revoked_key_fail_and_say_so() -> None:
    with pytest.raises(ApiError) as caught:
        _run(lambda _key_id: None)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_another_tenant_s_key_of_the_same_id_is_not_the_one_that_made_the_batch() -> None:
    with pytest.raises(ApiError) as caught:
        _run(lambda key_id: ApiKey(id=key_id, tenant="other", sha256="0" * 64))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
