"""A little of everything that `python -m tests.chaos` and its siblings do at length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos import burst, http, junk, soak
from tests.chaos.__main__ import main
from tests.chaos.client import exchange
from tests.chaos.mutate import Mutator
from tests.chaos.relay import Relay, Weather
from tests.chaos.services import Services, Settings, served


def test_a_few_rounds_lose_change_and_double_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--rounds", "3", "--seed", "23", "--jobs", "1", "--network", "relay"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.splitlines()[-1].startswith("rounds 3 lost 0 changed 0 duplicated 0 recovery_p99_ms ")


async def _each_on_one_service(services: Services) -> dict[str, object]:
    state = await soak.run(services, 1.0, 200, 1, step=100)
    return {
        "soak": state.wrong,
        "at rest": [sample.busy for sample in state.samples],
        "processes": set(state.samples[0].anonymous_mb),
        "fuzzed requests": await http.run(services, 60, 1),
        "junk": await junk.at_the_scheduler(services, 300, 1),
    }


@pytest.mark.nightly
def test_a_soak_fuzzed_requests_and_junk_do_no_harm(tmp_path: Path) -> None:
    settings = Settings(tmp_path, frontends=1, executors=1, delay_s=0.001)
    found = asyncio.run(served(settings, _each_on_one_service))
    assert found == {
        "soak": [],
        "at rest": [[], []],
        "processes": {"core", "executor", "frontend-0"},
        "fuzzed requests": [],
        "junk": [],
    }


@pytest.mark.nightly
def test_requests_made_from_the_description_are_answered_as_it_says(tmp_path: Path) -> None:
    settings = http.settings(tmp_path)
    assert asyncio.run(served(settings, lambda services: http.run(services, 0, 1, num_described=40))) == []


def test_junk_plans_do_no_harm(tmp_path: Path) -> None:
    assert junk.at_an_executor(tmp_path, 100, 1) == []


def test_a_burst_is_refused_exactly_where_the_rule_says(tmp_path: Path) -> None:
    assert asyncio.run(burst.run(tmp_path, 120, 30, 1, frontends=1)) == []


def test_growth_is_the_slope_of_memory() -> None:
    samples = [soak.Sample(n, {"core": 50 + n * 3e-4}, {"core": 9}, []) for n in range(0, 30_000, 1000)]
    assert soak.growth_mb(samples, "core") == pytest.approx(3.0)


def test_mutations_follow_their_seed_and_are_no_messages_for_the_most_part() -> None:
    corpus = junk.everything()
    one, other = Mutator(5, corpus), Mutator(5, corpus)
    made = [one.frames() for _ in range(200)]
    assert made == [other.frames() for _ in range(200)]
    assert len({frames[0] for frames in made}) > 150


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def _through_each_weather() -> dict[str, object]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[1])
    await relay.start()
    seen: dict[str, object] = {}

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"x")
        try:
            return await asyncio.wait_for(reader.read(9), 0.1)
        except TimeoutError:
            return b"nothing"

    streams = await asyncio.open_connection("127.0.0.1", relay.port)
    seen["fair"] = await say(*streams)
    relay.set(Weather.FROZEN)
    seen["frozen"] = await say(*streams)
    relay.set(Weather.FAIR)
    seen["thawed"] = await asyncio.wait_for(streams[0].read(9), 1)
    relay.set(Weather.HALF)
    seen["half"] = await say(*streams)
    relay.set(Weather.FAIR)
    seen["healed"] = await asyncio.wait_for(_end_of(streams[0]), 1)
    relay.set(Weather.CUT)
    seen["cut"] = (await exchange(relay.port, "GET", "/", patience_s=1)).end
    await relay.stop()
    server.close()
    return seen


async def _end_of(reader: asyncio.StreamReader) -> str:
    try:
        return "closed" if not await reader.read(9) else "data"
    except ConnectionError:
        return "closed"


def test_the_relay_makes_each_weather() -> None:
    assert asyncio.run(_through_each_weather()) == {
        "fair": b"x", "frozen": b"nothing", "thawed": b"x", "half": b"nothing", "healed": "closed", "cut": "broken",
    }  # fmt: skip
