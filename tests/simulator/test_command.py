"""The commands: what they print, and what they say of arguments that they cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler_svc.simulator import calibrate, cli, cost_model
from scheduler_svc.simulator.rows import SettingError, parse_comparison
from tests.simulator.test_traces import AZURE, write

SMALL = ["--requests", "20", "--prompt-lengths", "fixed:40", "--output-lengths", "uniform:1:30"]


def simulate(*arguments: str) -> int:
    return cli.main([*SMALL, *arguments], "gilir simulate")


def test_the_table_has_a_column_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--compare", "narrow:max_num_seqs=2", "--compare", "fair:discipline=fair,lanes=2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["base", "narrow", "fair"]
    shown = {line[:18].strip(): line[18:].split("  ") for line in lines[1:]}
    assert [cell.strip() for cell in shown["requests answered"] if cell.strip()] == ["20", "20", "20"]


def test_json_gives_an_object_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--json", "--compare", "narrow:max-num-seqs=2,blocks=64", "--tenants", "2") == 0
    base, narrow = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert base["name"] == "base" and base["measured_gain"] == base["predicted_gain"] == 1.0
    assert narrow["settings"]["max_num_seqs"] == 2 and narrow["settings"]["blocks"] == 64
    assert base["settings"]["max_num_seqs"] == 256
    assert narrow["measured_gain"] == pytest.approx(narrow["tokens_per_s"] / base["tokens_per_s"])
    assert narrow["deadline_misses"] is None and narrow["fairness_gap"] >= 0


def test_a_trace_is_replayed_and_a_report_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    arguments = ["--trace", str(write(tmp_path, AZURE)), "--rate", "1", "--report", str(report), "--name", "as it is"]
    assert cli.main(arguments, "gilir simulate") == 0
    assert "as it is" in capsys.readouterr().out and "as it is" in report.read_text()


def test_flags_change_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--discipline",
        "fair",
        "--no-chunked-prefill",
        "--prefix-caching",
        "false",
        "--tenant-weights",
        '{"t0": 2}',
    ]
    assert simulate("--json", *flags, "--overhead-ms", "2.5") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["discipline"] == "fair" and settings["tenant_weights"] == {"t0": 2.0}
    assert settings["chunked_prefill"] is False and settings["prefix_caching"] is False


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--discipline", "lottery"], "--discipline: expected one of fcfs, priority, fair, deadline, got 'lottery'"),
        (["--max-num-seqs", "few"], "--max-num-seqs: expected a whole number, got 'few'"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be at least 1, got 0"),
        (["--watermark", "1"], "--watermark: must be below 1"),
        (["--watermark", "nan"], "--watermark: expected a number"),
        (["--prefix-caching", "maybe"], "--prefix-caching: expected true or false"),
        (["--tenant-weights", '{"t0": 0}'], "--tenant-weights: expected JSON"),
        (["--lanes", "0"], "--lanes: must be at least 1"),
        (["--seats", "70000"], "--seats: expected an integer in [1, 65535]"),
        (["--overhead-ms", "-1"], "--overhead-ms: must be at least 0"),
        (["--cost", "h200"], "h200: neither a preset"),
        (["--compare", "x:kv=flat"], "--compare x:kv=flat: kv: expected one of paged, contiguous"),
        (["--compare", "x:speed=2"], "speed: there is no such setting"),
        (["--compare", "x:lanes"], "expected field=value, got 'lanes'"),
        (["--compare", "lanes=2"], "expected NAME:field=value"),
        (["--compare", "base:lanes=2"], "there are two runs named 'base'"),
        (["--rate", "-1"], "--rate: must be above 0"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("gilir simulate: ") and captured.err.count("\n") == 1 and wanted in captured.err


def test_refusals_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--blocks", "3") == 0
    assert "requests refused; the first: prompt and max_tokens need KV" in capsys.readouterr().err


def test_a_comparison_is_split_at_commas_outside_braces() -> None:
    name, changes = parse_comparison('fair:tenant-weights={"a": 1, "b": 2},lanes=2')
    assert name == "fair" and changes == {"tenant_weights": '{"a": 1, "b": 2}', "lanes": "2"}
    assert parse_comparison("same") == ("same", {})
    with pytest.raises(SettingError):
        parse_comparison(":lanes=2")


def plan_log(folder: Path, count: int) -> Path:
    """A log of one sequence that is prefilled and then decodes, in 10 ms + 1 ms a token + 10 µs a token of context."""
    lines, now = [], 0.0
    for i in range(count):
        chunk = 10 * (i + 1)
        for iteration, prefill in ((2 * i, chunk), (2 * i + 1, 0)):
            name = f"r{i}"
            rows = {"prefills": [[0, name, prefill]] if prefill else [], "decodes": [] if prefill else [[0, name]]}
            lines.append({"t": now, "lane": "e", "epoch": 1, "iteration": iteration, **rows})
            now += 0.010 + (0.001 * prefill if prefill else 0.00001 * (chunk + 1))
            lines.append({"t": now, "lane": "e", "epoch": 1, "iteration": iteration, "finished": 0})
    path = folder / "plans.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_calibrate_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.json"
    assert calibrate.main([str(plan_log(tmp_path, 40)), "--output", str(output)], "gilir calibrate") == 0
    assert "80 iterations, 16 of them held out" in capsys.readouterr().out
    model = cost_model.load(str(output))
    assert model.name == "mine" and model.fit["samples"] == 80
    assert model.seconds(0, 100, 0, 5050, 0) == pytest.approx(0.110, rel=0.02)
    assert model.seconds(1, 0, 200, 0, 0) == pytest.approx(0.012, rel=0.02)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "0 iterations with a duration"),
        ("{}\n", "line 1: not an entry of a plan log"),
        ("junk\n", "line 1: not an entry of a plan log"),
    ],
)
def test_a_log_that_cannot_be_used_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wanted: str
) -> None:
    path = write(tmp_path, text)
    assert calibrate.main([str(path), "--output", str(tmp_path / "o.json")], "gilir calibrate") == 2
    assert wanted in capsys.readouterr().err
