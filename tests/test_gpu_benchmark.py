"""The GPU benchmark runs: on tiny shapes, on the CPU, so that no time on a GPU is spent on finding typos."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import all as benchmark


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the benchmark changes in its process is put back."""
    monkeypatch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", ""))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit status, and the rows of each part. A row is in the table as well."""
    status = benchmark.main([*flags, "--device", "cpu", "--tiny"])
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(lines) == 2 * len(rows)
    return status, {name: [row for row in rows if row["part"] == name] for name in benchmark.PARTS}


@pytest.mark.nightly
def test_every_part_runs(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [name for name in benchmark.PARTS if name != "kernel_tests"]
    status, found = results(capsys, "--here", "--parts", ",".join(parts))
    assert status == 0
    decodes = [row for row in found["decode"] if row["what"] == "decode"]
    assert [row["batch"] for row in decodes] == [1, 3]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 and row["bubble_us"] >= 0 for row in decodes)
    mixed = [row for row in found["decode"] if row["what"] == "mixed"]
    assert [(row["decodes"], row["tokens"], row["graphs"]) for row in mixed] == [(0, 5, False), (2, 11, False)]
    assert all(row["ms"] > 0 and row["device_ms"] > 0 for row in mixed)
    (pool,) = (row for row in found["large_pool"] if row["what"] == "pool")
    assert pool["last_blocks_equal"] and pool["moved_blocks_equal"]
    assert [row["batch"] for row in found["batch_invariant"][:-1]] == [1, 3, 1, 1, 3]
    answers = [row for row in found["same_answer"] if row["what"] == "same answer"]
    assert {(row["batch_invariant"], row["batch"], row["chunk"]) for row in answers} == {
        (mode, batch, chunk) for mode in (True, False) for batch in (2, 3) for chunk in (0, 33)
    }
    assert all(row["same_bits"] for row in answers if row["batch_invariant"])
    assert {row["what"] for row in found["first_request"]} >= {"warm-up", "batch 3", "prompt 65", "penalties"}
    assert all(found[name][-1]["what"] == "time" for name in parts)
    assert found["transformers_peer"][0]["what"] == "skipped"


def test_a_part_that_fails_takes_no_other_along(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    status, found = results(capsys, "--here", "--parts", "no_such_part,transformers_peer", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 1
    assert (rows[0]["what"], "no_such_part" in rows[0]["why"]) == ("FAILED", True)
    assert found["transformers_peer"][0]["what"] == "skipped"


@pytest.mark.nightly
def test_a_part_has_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = results(capsys, "--parts", "transformers_peer")
    assert status == 0
    assert [row["what"] for row in found["transformers_peer"]] == ["skipped", "time"]


def test_wheels_are_imported_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "VALUE = 7")
    monkeypatch.setattr("sys.path", ["/nowhere"])
    benchmark.unpack(tmp_path / "wheels", tmp_path / "packages")
    import carried  # type: ignore[import-not-found]

    assert carried.VALUE == 7
