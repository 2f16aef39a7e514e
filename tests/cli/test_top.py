"""`gilir top`: the picture that it makes of the live page's events, its frames, and its keys."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scheduler_svc.cli import main
from scheduler_svc.cli.top import command
from scheduler_svc.cli.top.frame import MIN_HEIGHT, MIN_WIDTH, frame
from scheduler_svc.cli.top.picture import Picture, quantile
from tests.cli.in_terminal import InTerminal
from tests.cli.stub_server import Stub

EVENTS = "GET /dashboard/events"


def lane(name: str, epoch: int = 1, state: str = "attached", **more: Any) -> dict[str, Any]:
    sizes = {"seats": 8, "running": 4, "token_budget": 64, "block_size": 16, "blocks": 100}
    kv = {"blocks_referenced": 50, "blocks_cached": 20, "reason": ""}
    return {"epoch": epoch, "name": name, "model": "m", "state": state, **sizes, **kv, **more}


def waiter(number: int, **more: Any) -> dict[str, Any]:
    told = {"s": number, "reason": "seats", "waited": 1.25, "preemptions": 0}
    return told | {"id": f"request-{number}", "index": 0, "generated": 3} | more


def status(tokens: float = 0, lanes: list[Any] | None = None, waiting: list[Any] | None = None) -> dict[str, Any]:
    counts = [0, tokens, tokens]
    waiting = waiting or []
    return {
        "lanes": [lane("gpu-0")] if lanes is None else lanes,
        "waiting": waiting,
        "num_waiting": {"seats": len(waiting), "kv_blocks": 0},
        "latency": {"ttft": {"bounds": [0.1, 0.2], "counts": counts}},
        "counters": {"tokens": tokens, "iterations": tokens / 2, "preemptions": 3, "lost": 1},
    }


def row(ms: float, decodes: int, *chunks: int, epoch: int = 1) -> dict[str, Any]:
    return {"lane": epoch, "ms": ms, "d": list(range(decodes)), "pl": list(chunks)}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def picture(clock: Clock) -> Picture:
    return Picture(clock)


def shown(picture: Picture, width: int = 80, height: int = 24) -> list[str]:
    lines = [line.plain for line in frame(picture, "http://h:1", width, height)]
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    assert len(lines) < height and max(map(len, lines)) <= width, lines
    return lines


def test_rates_are_those_of_the_last_seconds(picture: Picture, clock: Clock) -> None:
    for second in range(20):
        clock.now = 100.0 + second
        picture.take("status", status(tokens=100.0 * max(0, second - 10)))
    assert picture.rate("tokens") == pytest.approx(100) and picture.rate("iterations") == pytest.approx(50)
    assert picture.rate("no such") == 0
    clock.now += 30
    assert picture.rate("tokens") < 20  # nothing new has come since


def test_an_executor_shows_the_mean_of_its_last_iterations(picture: Picture, clock: Clock) -> None:
    picture.take("rows", {"rows": [row(500, 1)]})
    clock.now += 6
    picture.take("rows", {"rows": [row(10, 2), row(20, 2, 30), row(99, 9, epoch=2)]})
    assert picture.iteration(1) == pytest.approx((0.015, 17)) and picture.iteration(3) is None


def test_quantiles_are_linear_within_a_bucket() -> None:
    assert quantile(0.5, [1, 2, 4], [0, 10, 10, 10]) == pytest.approx(1.5)
    assert quantile(0.99, [1, 2, 4], [0, 0, 0, 5]) == 4  # beyond the last edge
    assert quantile(0.5, [1], [0, 0]) is None


def test_latency_is_that_of_the_window(picture: Picture, clock: Clock) -> None:
    old, new = status(), status(1)
    old["latency"]["ttft"]["counts"], new["latency"]["ttft"]["counts"] = [50, 50, 50], [50, 60, 60]
    picture.take("status", old)
    clock.now += 1
    picture.take("status", new)
    assert picture.latency("ttft", 0.5) == pytest.approx(0.15) and picture.latency("itl", 0.5) is None


def test_a_frame_has_the_executors_and_who_waits_for_what(picture: Picture, clock: Clock) -> None:
    lanes = [lane("lost-1", 2, "lost", reason="silent for 3 s"), lane("gpu-0"), lane("gpu-1", 3, "draining")]
    waiting = [
        waiter(1),
        waiter(2, reason="kv_blocks", preemptions=2, index=1),
        {"s": 3, "reason": "x", "waited": 0.5, "preemptions": 0},
    ]
    picture.take("status", status(0, lanes, waiting))
    clock.now += 1
    picture.take("rows", {"rows": [row(10, 4)]})
    picture.take("status", status(200, lanes, waiting))
    lines = shown(picture)
    text = "\n".join(lines)
    assert "running 8 of 16 seats    waiting 3: 3 for a seat" in text  # a lost one has no seats
    assert "200 tokens/s    100.0 iterations/s    preemptions 3    executors lost 1" in text
    assert "TTFT 150ms/199ms  ITL -/-" in text
    places = {
        name: next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("gpu-0", "gpu-1", "lost-1")
    }
    assert places["gpu-0"] < places["gpu-1"] < places["lost-1"]
    assert lines[places["gpu-0"]].split()[1:] == ["attached", "████", "4/8", "████", "50%", "+20%", "10", "ms", "4.0"]
    assert lines[places["lost-1"]].endswith("silent for 3 s")
    (second,) = [line for line in lines if line.startswith("request-2/1")]
    assert second.split()[1:] == ["KV", "blocks", "1.2", "s", "2×", "3"] and "another tenant's" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 14), (200, 60), (10, 3)])
@pytest.mark.parametrize("lanes", [0, 1, 100])
@pytest.mark.parametrize("waiting", [0, 2, 64])
def test_a_frame_fits_whatever_there_is(picture: Picture, width: int, height: int, lanes: int, waiting: int) -> None:
    named = [lane(f"executor with a long name {i}", i) for i in range(lanes)]
    told = status(0, named, [waiter(i, id=f"{i}-" + "x" * 60) for i in range(waiting)])
    told["num_waiting"] = {"seats": 3 * waiting}
    picture.take("status", told)
    lines = shown(picture, width, height)
    assert waiting < 2 or any(line.startswith("0-x") for line in lines)
    assert waiting < 64 or any(line.startswith("and ") for line in lines)
    assert lanes or "no executor is attached" in lines


def test_names_of_others_cannot_steer_the_terminal(picture: Picture) -> None:
    picture.take("status", status(0, [lane("\033[2Jgpu\n0")], [waiter(1, id="a\033]0;x\007b")]))
    assert not any(set("\033\007\n") & set(line) for line in shown(picture))


def events() -> Iterator[Any]:
    for count in itertools.count(1):
        yield "rows", {"sequences": [], "rows": [row(10, 2)]}
        yield "status", status(100 * count, waiting=[waiter(1)])
        time.sleep(0.05)


def test_one_frame_is_printed(stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub.replies[EVENTS] = lambda _: (200, events())
    monkeypatch.setattr(command, "ONCE_S", 60.0)  # however slow the machine is, there will be rates
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert main(["top", "--once", "--url", stub.url, "--api-key", "k"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"gilir top {stub.url}") and "request-1" in out and "\n0 tokens/s" not in out
    assert max(map(len, out.splitlines())) <= 80 and "\033" not in out
    assert stub.headers[-1]["authorization"] == "Bearer k"


def test_a_stream_that_ends_before_anything_was_told_is_an_error(stub: Stub, fails: Callable[..., str]) -> None:
    stub.say(EVENTS, 200, b"")
    assert fails("top", "--once", "--url", stub.url) == "the server has ended the connection"
    assert "this is no terminal" in fails("top", "--url", stub.url)


def test_in_a_terminal_it_goes_on_until_q(stub: Stub) -> None:
    stub.replies[EVENTS] = lambda _: (200, events())
    with InTerminal.gilir("top", "--url", stub.url) as terminal:
        terminal.wait_for("request-1")
        terminal.press("p")
        terminal.wait_for("paused")
        terminal.press("p")
        terminal.wait_for("live")
        terminal.press("q")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown and "\033[?1049l" in terminal.shown  # the screen is as before
