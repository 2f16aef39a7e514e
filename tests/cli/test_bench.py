"""`gilir bench`: what it sends, its figures, its report, and how it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_svc.cli import main
from scheduler_svc.cli.bench import command
from scheduler_svc.cli.bench.client import Answer
from scheduler_svc.cli.bench.figures import figures
from scheduler_svc.cli.bench.prompts import HIGHEST_ID, LOWEST_ID
from scheduler_svc.cli.bench.prompts import requests as prompts_of
from scheduler_svc.cli.bench.report import render
from scheduler_svc.simulator.workload import WorkloadSettings, build
from tests.cli.stub_server import Reply, Stub, chat_events

COMPLETE, CHAT = "POST /v1/completions", "POST /v1/chat/completions"
SMALL = ["--requests", "6", "--prompt-lengths", "fixed:5", "--output-lengths", "uniform:2:4"]


def completes(body: Any) -> Reply:
    """As many tokens as were asked for."""
    return 200, completion_events(body["max_tokens"], len(body["prompt"]))


def completion_events(count: int, prompt: int) -> Iterator[Any]:
    for _ in range(count):
        yield {"choices": [{"text": "a", "finish_reason": None}]}
    yield {"choices": [{"text": "", "finish_reason": "length"}]}
    yield {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count}}


def test_json_has_all_figures_of_what_was_asked(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.replies[COMPLETE] = completes
    assert main(["bench", "--url", f"{stub.url}/v1", "--api-key", "secret", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    bodies = [body for route, body in stub.asked if route == COMPLETE]
    assert len(bodies) == 2 + 6 and all(body["ignore_eos"] and len(body["prompt"]) == 5 for body in bodies)
    assert (found["requests"], found["failed"], found["errors"], found["prompt_tokens"]) == (6, 0, {}, 30)
    assert found["output_tokens"] == sum(body["max_tokens"] for body in bodies[2:])
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert stub.headers[-1]["Authorization"] == "Bearer secret"


def test_a_chat_server_without_ignore_eos_is_measured_with_text(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.replies[CHAT] = lambda _: (200, chat_events([{"content": "a"}, {"reasoning_content": "b"}]))
    report = tmp_path / "report.html"
    flags = ["--api", "chat", "--allow-eos", "--rate", "200", "--html", str(report)]
    assert main(["bench", "--url", stub.url, *flags, *SMALL]) == 0
    _, body = stub.asked[-1]
    assert "ignore_eos" not in body and len(body["messages"][0]["content"].split()) == 5
    out = capsys.readouterr().out
    assert re.search(r"output tokens +12\b", out) and re.search(r"time to first token, ms( +[\d.]+){4}", out)
    assert "rate 200" in report.read_text() and report.read_text().count("<svg viewBox") == 6


def test_failures_are_counted_by_what_they_say(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter(range(100))

    def sometimes(body: Any) -> Reply:
        if next(turns) % 2:
            return 429, {"error": {"message": "later"}}
        return completes(body)

    stub.replies[COMPLETE] = sometimes
    assert main(["bench", "--url", stub.url, "--warm-up", "0", "--concurrency", "1", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"requests failed +3\b", out) and re.match(r"3 × ValueError: HTTP/1.\d 429 ", err)
    assert err.count("\n") == 1


def test_a_load_that_always_fails_ends_at_once(stub: Stub, fails: Callable[..., str]) -> None:
    stub.refuse(COMPLETE, 400, "token ids are not known here")
    assert "token ids are not known here" in fails("bench", "--url", stub.url, *SMALL)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--output-lengths", "some"], "--output-lengths: expected fixed:N"),
        (["--trace", "/no/such/trace"], "/no/such/trace: No such file"),
        (["--arrivals", "poisson"], "--arrivals poisson needs --rate"),
        (["--concurrency", "4", "--rate", "2"], "--concurrency goes with --arrivals closed"),
    ],
)
def test_a_load_that_makes_no_sense_is_a_wrong_usage(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"gilir bench: {text}") and err.count("\n") == 1


def test_ctrl_c_ends_with_the_figures_so_far(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.replies[COMPLETE] = completes
    real, count = command.closed_loop, iter(range(100))

    async def interrupted(client: Any, requests: Any, concurrency: int, tell: Callable[[Answer], None]) -> None:
        def tell_some(answer: Answer) -> None:
            tell(answer)
            if next(count) == 3:
                raise KeyboardInterrupt

        await real(client, requests, concurrency, tell_some)

    monkeypatch.setattr(command, "closed_loop", interrupted)
    assert main(["bench", "--url", stub.url, "--warm-up", "0", "--concurrency", "1", "--json", *SMALL]) == 130
    assert json.loads(capsys.readouterr().out)["requests"] == 4


def test_prompts_share_a_prefix_exactly_where_the_trace_says_so(tmp_path: Path) -> None:
    rows = [(600, [1, 2]), (700, [1, 3]), (300, [4])]
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "input_length": n, "output_length": 3, "hash_ids": ids} for n, ids in rows]
    trace.write_text("\n".join(map(json.dumps, lines)))
    workload = build(WorkloadSettings(trace=trace))
    first, second, third = (request.prompt for request in prompts_of(workload, 0, as_text=False))
    assert [len(first), len(second), len(third)] == [600, 700, 300]
    assert first[:512] == second[:512] and first[512:600] != second[512:600] and third != first[:300]
    assert min(map(int, first)) >= LOWEST_ID and max(map(int, first)) < HIGHEST_ID
    text = prompts_of(workload, 0, as_text=True)[0].prompt
    assert isinstance(text, str) and len(text.split()) == 600


def good(count: int) -> list[Answer]:
    answers = []
    for i in range(count):
        sent = 0.1 * i
        answers.append(Answer(sent, [sent + 0.1, sent + 0.15, sent + 0.35], sent + 0.4, 3, prompt_tokens=7))
    return answers


def test_figures_come_from_the_times_of_the_good_answers() -> None:
    found = figures([*good(4), Answer(0.0, error="broken"), Answer(0.0, ended=9.0), Answer(0.0, error="broken")])
    assert (found["requests"], found["failed"]) == (4, 3)
    assert found["errors"] == {"broken": 2, "an answer without tokens": 1}
    assert found["seconds"] == pytest.approx(0.7) and found["output_tokens_per_s"] == pytest.approx(12 / 0.7, abs=0.01)
    assert found["ttft_ms"]["p50"] == pytest.approx(100) and found["itl_ms"]["mean"] == pytest.approx(125)
    assert found["tpot_ms"]["p99"] == pytest.approx(125) and found["e2e_ms"]["p90"] == pytest.approx(400)


class Outside(HTMLParser):
    """Collects whatever a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attributes if name in ("src", "href", "srcset", "action")]
        self.found += [tag] * (tag in ("script", "link", "img", "iframe"))


def test_the_report_asks_for_nothing_outside_itself_and_escapes_what_servers_say() -> None:
    answers = [*good(30), Answer(0.0, error="<script>alert(1)</script>")]
    text = render({"server": "http://x"}, figures(answers), answers)
    page = Outside()
    page.feed(text)
    assert page.found == [] and "@import" not in text and "url(" not in text
    assert "&lt;script&gt;" in text and "prefers-color-scheme: dark" in text
    assert not np.any([word in text for word in ("nan", "inf,", "NaN")])
    assert "No request was answered" in render({}, figures([]), [])
