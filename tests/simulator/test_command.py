"""The commands: what they print, and what they say of arguments that they cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler_svc.core import SchedulerConfig
from scheduler_svc.core.config import Admission, Preemption
from scheduler_svc.plan_log import PlanLog, RecordedScheduler
from scheduler_svc.simulator import calibrate, cli, cost_model
from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.rows import SettingError, parse_comparison
from scheduler_svc.simulator.simulation import ExecutorSetup, Simulation
from scheduler_svc.simulator.workload import WorkloadSettings, build
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


VIRTUAL = CostModel("virtual", ((0.010, 0.0002, 0.0003, 1e-6, 1e-8, 0.002),))


def plan_log(folder: Path) -> Path:
    """The log of a simulation with swaps, whose iterations take as long as `VIRTUAL` says."""
    log = PlanLog(folder / "plans")
    settings = WorkloadSettings(
        requests=60, prompt_lengths="uniform:1:60", output_lengths="uniform:1:60", arrivals="poisson", rate=20.0
    )
    config = SchedulerConfig(preemption=Preemption.SWAP, admission=Admission.IMMEDIATE, prefix_caching=False)
    setup = ExecutorSetup(blocks=60, block_size=4, host_blocks=100, seats=12)
    Simulation(config, setup, VIRTUAL, build(settings), lambda config: RecordedScheduler(config, log)).run()
    log.close()
    return folder / "plans"


def test_calibrate_finds_the_cost_model_that_made_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.json"
    assert calibrate.main([str(plan_log(tmp_path)), "--output", str(output)], "gilir calibrate") == 0
    assert "relative error of the held-out: median 0.0%" in capsys.readouterr().out
    model = cost_model.load(str(output))
    assert model.name == "mine" and model.fit["p90_error"] < 1e-3
    assert model.pieces[0] == pytest.approx(VIRTUAL.pieces[0], rel=0.01)


def test_calibrate_can_leave_out_the_beginning(tmp_path: Path) -> None:
    log = plan_log(tmp_path)
    counts = []
    for skip in ("0", "100"):
        assert calibrate.main([str(log), "--output", str(tmp_path / "m"), "--skip", skip], "gilir calibrate") == 0
        counts.append(cost_model.load(str(tmp_path / "m")).fit["samples"])
    assert counts[0] - counts[1] == 100


def test_a_log_that_cannot_be_used_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (write(tmp_path, "junk"), tmp_path / "nothing"):
        assert calibrate.main([str(path), "--output", str(tmp_path / "o.json")], "gilir calibrate") == 2
        assert str(path) in capsys.readouterr().err
    assert calibrate.main([str(plan_log(tmp_path)), "--output", str(tmp_path)], "gilir calibrate") == 2
    assert "--output" in capsys.readouterr().err


def test_too_few_iterations_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(plan_log(tmp_path)), "--output", str(tmp_path / "o.json"), "--skip", "1000000"]
    assert calibrate.main(arguments, "gilir calibrate") == 2
    assert "0 iterations with a duration" in capsys.readouterr().err
