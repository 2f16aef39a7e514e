"""The serving benchmark keeps running, and its figures are those of what its client saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import iterations, serve
from benchmarks.client import Answer, Client, Request, figures, open_loop, read_workload, salted, synthetic
from scheduler_svc.plan_log.reader import IterationSample

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.nightly
def test_both_loops_over_own_services_give_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt_ids": [10, 11, 12, 13], "output_len": 6}\n' * 3)
    flags = ["--executor-flags", "--threads 1 --max-num-seqs 4 --num-blocks 256 --max-num-batched-tokens 64"]
    flags += ["--workload", str(tmp_path / "w.jsonl"), "--concurrency", "2", "--rate", "20", "--json"]
    assert serve.main(flags) == 0
    closed, opened = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for line in (closed, opened):
        assert line["failed"] == 0 and line["output_tokens"] == 18
        assert 0 < line["budget_fill"] <= 1 and 0 < line["bubble_share"] < 1
        assert line["iterations"] * line["tokens_an_iteration"] >= 18
        assert 0 < line["itl_p50_ms"] <= line["itl_p99_ms"] and line["ttft_p50_ms"] > 0 and line["peak_rss_mib"] > 0
    assert (closed["concurrency"], opened["rate"]) == (2, 20)


@asynccontextmanager
async def canned(send: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[str]:
    """A server that sends the same to every request; its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"model": "m"}')
        send(writer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def ask(send: Callable[[asyncio.StreamWriter], None]) -> Answer:
    async def once() -> Answer:
        async with canned(send) as url:
            return await Client(url, "m", timeout_s=5).ask(Request([1, 2], 2))

    return asyncio.run(once())


EVENTS = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\r\n\r\n'
    b'data: {"choices": [{"text": "b", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [7, 1000])
def test_a_chunked_stream_is_read_wherever_it_is_cut(size: int) -> None:
    def send(writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + b"Transfer-Encoding: Chunked\r\n\r\n")
        for place in range(0, len(EVENTS), size):
            part = EVENTS[place : place + size]
            writer.write(f"{len(part):x};note=x\r\n".encode() + part + b"\r\n")
        writer.write(b"0\r\n\r\n")

    answer = ask(send)
    assert (answer.error, answer.tokens, len(answer.times)) == ("", 2, 2)


def test_an_answer_that_is_short_refused_or_cut_off_is_no_good_answer() -> None:
    assert ask(lambda w: w.write(SSE + b"\r\n" + EVENTS.replace(b'tokens": 2', b'tokens": 1'))).error
    assert "429" in ask(lambda w: w.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater")).error
    assert ask(lambda w: w.write(SSE + b"Transfer-Encoding: chunked\r\n\r\nff\r\ndata")).error
    assert "no memory" in ask(lambda w: w.write(SSE + b'\r\ndata: {"error": "no memory"}\n\n')).error


def test_figures_come_from_the_times_of_the_good_answers() -> None:
    good = [Answer(0.0, [1.0, 1.5, 3.0], 3.0, 5), Answer(1.0, [1.5], 4.0, 1)]
    found = figures([*good, Answer(0.0, [9.0], 99.0, 3, "broken")])
    assert (found["requests"], found["failed"], found["output_tokens_per_s"]) == (2, 1, 6 / 4)
    assert found["ttft_p50_ms"] == 750 and found["tpot_p50_ms"] == 500
    assert found["itl_p50_ms"] == 1000 and found["itl_p99_ms"] == pytest.approx(1490)
    assert figures([Answer(0.0, error="broken")]) == {"requests": 0, "failed": 1}


def test_arrivals_of_an_open_loop_do_not_wait_for_answers() -> None:
    class Slow(Client):
        async def ask(self, request: Request) -> Answer:
            answer = Answer(asyncio.get_running_loop().time())
            await asyncio.sleep(0.3)
            answer.ended = asyncio.get_running_loop().time()
            return answer

    answers = asyncio.run(open_loop(Slow("http://x", "m"), [Request([1, 2], 1)] * 5, rate=1000))
    assert max(answer.sent for answer in answers) < min(answer.ended for answer in answers)


def test_a_salted_prompt_differs_from_its_second_token_on_and_keeps_its_length(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(json.dumps({"prompt_ids": r.prompt, "output_len": r.output}) for r in synthetic(20)))
    requests = read_workload(path)
    assert requests == synthetic(20)
    changed = salted(requests, 1)
    assert changed == salted(requests, 1) != salted(requests, 2)
    assert all(
        a.prompt[0] == b.prompt[0] and a.prompt[2:] == b.prompt[2:] for a, b in zip(requests, changed, strict=True)
    )
    assert np.mean([a.prompt[1] != b.prompt[1] for a, b in zip(requests, changed, strict=True)]) > 0.9


def sample(iteration: int, at: float, busy_us: int, decodes: int, prefill: int = 0) -> IterationSample:
    return IterationSample("lane", 1, iteration, at, 0.0, busy_us, busy_us // 2, decodes, prefill, 0, 0.0, 0, 8, 64, 16)


def test_a_bubble_is_the_idle_time_before_an_iteration_whose_rows_were_running() -> None:
    samples = [
        sample(1, 0.0, 8000, 0, 30),
        sample(2, 0.010, 4000, 2),
        sample(3, 0.016, 5000, 2),
        sample(4, 9.0, 5000, 0, 10),  # nothing ran before: it waited for a request
        sample(6, 9.1, 5000, 1),  # the one before it is not in the log
    ]
    assert iterations.bubbles(samples) == [pytest.approx((0.002, 0.010)), pytest.approx((0.002, 0.006))]
    found = iterations.figures(samples, token_budget=100)
    assert found["bubble_share"] == pytest.approx(4 / 16) and found["bubble_p50_ms"] == pytest.approx(2)
    assert found["budget_fill"] == pytest.approx(0.09) and found["budget_fill_with_prefill"] == pytest.approx(0.2)
