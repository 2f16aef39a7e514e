"""Trace readers: what they read, and what they say of a line that they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.simulator.traces import TraceError, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00.0000000,879,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]}
"""
SHAREGPT = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.08
290,905,1195,0.32
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.txt"
    path.write_text(text)
    return path


def test_azure_rows_have_times_and_an_empty_answer_counts_as_one_token(tmp_path: Path) -> None:
    trace = read(write(tmp_path, AZURE))
    assert trace.arrivals is not None
    assert trace.arrivals.tolist() == pytest.approx([0.0, 4.314579, 13.31941])
    assert trace.prompt_lengths.tolist() == [374, 396, 879]
    assert trace.output_lengths.tolist() == [44, 109, 1]
    assert trace.prefixes is None


def test_mooncake_rows_have_milliseconds_and_prefixes(tmp_path: Path) -> None:
    trace = read(write(tmp_path, MOONCAKE))
    assert trace.arrivals is not None and trace.prefixes is not None
    assert trace.arrivals.tolist() == [0.0, 1.5]
    assert trace.prompt_lengths.tolist() == [600, 1024]
    assert [ids.tolist() for ids in trace.prefixes] == [[0, 1], [0, 2]]


def test_sharegpt_rows_have_lengths_alone(tmp_path: Path) -> None:
    trace = read(write(tmp_path, SHAREGPT))
    assert trace.arrivals is None and trace.prefixes is None
    assert trace.prompt_lengths.tolist() == [74, 290]
    assert trace.output_lengths.tolist() == [918, 905]


def test_rows_out_of_order_are_sorted_by_time(tmp_path: Path) -> None:
    first, second = MOONCAKE.splitlines()
    trace = read(write(tmp_path, f"{second}\n{first}\n"))
    assert trace.prompt_lengths.tolist() == [600, 1024]


def test_a_limit_reads_the_first_rows_alone(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "nonsense\n")
    assert len(read(path, 2).prompt_lengths) == 2


@pytest.mark.parametrize(
    ("text", "layout", "wanted"),
    [
        ("a,b\n1,2\n", "auto", "line 1: unknown format"),
        ("", "auto", "line 1: unknown format"),
        (SHAREGPT, "azure", "line 1: no column 'TIMESTAMP'"),
        (AZURE.splitlines()[0], "auto", "holds no requests"),
        (AZURE.replace("396,109", "396"), "auto", "line 3: 2 values for 3 columns"),
        (AZURE.replace("396", "many"), "auto", "line 3: ContextTokens: expected a whole number, got 'many'"),
        (AZURE.replace("109", "-1"), "auto", "line 3: GeneratedTokens: -1 is out of range"),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), "auto", "line 3: TIMESTAMP: expected YYYY"),
        (SHAREGPT.replace("905", "9.5"), "auto", "line 3: num_decode_tokens: expected a whole number"),
        (MOONCAKE + "{\n", "auto", "line 3: not a JSON object"),
        (MOONCAKE + "[]\n", "auto", "line 3: not a JSON object"),
        (MOONCAKE.replace("1500", "true"), "auto", "line 2: timestamp: expected milliseconds, got True"),
        (MOONCAKE.replace("1024", "1025"), "auto", "line 2: hash_ids: 2 blocks of 512 do not hold 1025 tokens"),
        (MOONCAKE.replace("[0, 2]", "[0, -2]"), "auto", "line 2: hash_ids: expected a list of whole numbers"),
        (MOONCAKE.replace('"output_length": 7, ', ""), "auto", "line 2: output_length: expected a whole number"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, layout: str, wanted: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read(path, layout=layout)
    assert str(path) in str(caught.value) and wanted in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "nothing.csv")
