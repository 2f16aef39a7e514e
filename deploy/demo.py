"""`make demo`: eight requests of different lengths on four seats, and who was in the batch at each iteration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from deploy.local import LocalServices, ServiceFailed
from scheduler_svc.plan_log.reader import rows

SEATS = 4


@dataclass(frozen=True)
class Demand:
    """One request of the demonstration."""

    letter: str
    prompt: str
    max_tokens: int
    chat: bool = False
    stream: bool = False


DEMANDS = [
    Demand("A", "In the beginning", 48),
    Demand("B", "Tell me about the sea.", 30, chat=True, stream=True),
    Demand("C", "The king said to his servants,", 8),
    Demand("D", "There was a man who", 24, stream=True),
    Demand("E", "Tell me a story.", 40, chat=True),
    Demand("F", "And it came to pass", 12, stream=True),
    Demand("G", "The young woman went to", 20),
    Demand("H", "Blessed are", 16, stream=True),
]


def ask(client: httpx.Client, demand: Demand) -> str:
    """Send one request and return its text; the server's id of it is the letter."""
    body: dict[str, object] = {"max_tokens": demand.max_tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": demand.prompt}]} if demand.chat else {"prompt": demand.prompt}
    path = "/v1/chat/completions" if demand.chat else "/v1/completions"
    headers = {"x-request-id": demand.letter}
    if demand.stream:
        with client.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer:
            answer.raise_for_status()
            return "".join(read_stream(answer.iter_lines()))
    answer = client.post(path, json=body, headers=headers)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return str(choice["message"]["content"] if demand.chat else choice["text"])


def read_stream(lines: Iterator[str]) -> Iterator[str]:
    """The text pieces of an event stream."""
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            yield choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


def batch_table(log: Path) -> Iterator[str]:
    """Seats across, iterations down; runs of iterations with the same members are one line."""
    previous: tuple[str, ...] | None = None
    first = last = 0
    for record in rows(log):
        if "decodes" not in record:
            continue
        seats = ["."] * SEATS
        for slot, name, *_ in record["decodes"] + record["prefills"]:
            seats[slot] = name.split("/")[0][-1]
        members = tuple(seats)
        if members != previous:
            if previous is not None:
                yield f"  {first:>4} – {last:<4}  {' '.join(previous)}"
            previous, first = members, record["iteration"]
        last = record["iteration"]
    if previous is not None:
        yield f"  {first:>4} – {last:<4}  {' '.join(previous)}"


def main() -> int:
    with LocalServices(scheduler_flags=["--max-num-seqs", str(SEATS)]) as services:
        try:
            print("starting a scheduler and an executor …", flush=True)
            services.start_scheduler()
            services.start_executor()
            services.wait_ready(tell=partial(print, flush=True))
        except ServiceFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"ready: {services.url} — {len(DEMANDS)} requests at once, {SEATS} seats\n", flush=True)
        with httpx.Client(base_url=services.url, timeout=120) as client, ThreadPoolExecutor(len(DEMANDS)) as pool:
            for demand, text in zip(DEMANDS, pool.map(lambda demand: ask(client, demand), DEMANDS), strict=True):
                kind = ("chat" if demand.chat else "text") + (", stream" if demand.stream else "")
                print(f"{demand.letter} ({kind}, {demand.max_tokens} tokens) {demand.prompt!r}\n    {text.strip()!r}")
        print("\nwho was in the batch (a finished sequence's seat is taken in the very next iteration)\n")
        print("  iterations   seats")
        print("\n".join(batch_table(services.plan_log)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
