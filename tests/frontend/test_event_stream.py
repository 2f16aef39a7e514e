"""Events of a stream: written at once while the client reads, joined while it does not, and nothing lost either way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHATML, byte_level, card
from uvicorn.protocols.http.flow_control import FlowControl

from common.wire import Ended, EndReason, Submit, Tokens
from scheduler_svc.frontend.call import Call, Task
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.event_stream import Delivery
from scheduler_svc.frontend.logprobs import LogprobWriter
from scheduler_svc.frontend.models import _build
from scheduler_svc.frontend.parameters import read_parameters
from scheduler_svc.frontend.prompts import Prompt
from scheduler_svc.frontend.scheduling import TimeLimit
from scheduler_svc.frontend.shapes import ChatShape, CompletionShape
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.frontend.streams import Generation, Stream, tokens_by_stream
from scheduler_svc.frontend.token_fields import TokenFields
from scheduler_svc.http.body_writer import BodyWriter
from scheduler_svc.http.errors import internal
from scheduler_svc.http.fields import Fields

MODEL = _build(card("m", byte_level(), CHATML), 100_000)
WORDS = MODEL.tokenizer.encode("the quick brown fox jumps over the lazy dog", False)


@dataclass
class Connection:
    """Notes what is written, and is full when the test says so."""

    parts: list[bytes] = field(default_factory=list)
    is_full: bool = False
    on_room: Callable[[], None] | None = None

    def open(self, on_room: Callable[[], None]) -> None:
        self.on_room = on_room

    def close(self) -> None:
        self.on_room = None

    def write(self, part: bytes) -> None:
        assert not self.is_full
        self.parts.append(part)

    def make_room(self) -> None:
        self.is_full = False
        if self.on_room is not None:
            self.on_room()


class Link:
    """In the place of the core's: opens the streams of a call."""

    def submit(self, generation: Generation, requests: list[Submit]) -> None:
        for request in requests:
            for _ in range(request.n):
                choice, scored = len(generation.streams), request.params.logprobs >= 0
                generation.streams.append(Stream(generation, choice, choice, scored, None))


def new_call(*, chat: bool, n: int, rich: bool) -> tuple[Call, ChunkWriter]:
    """`rich`: with logprobs and token ids."""
    parameters = read_parameters(Fields({"stream": True, "n": n}), MODEL, max_tokens_names=("max_tokens",))
    sampling = replace(parameters.sampling_for(MODEL, 3, 400, "prompt"), logprobs=0 if rich else -1)
    writer = LogprobWriter(MODEL.tokenizer, 0, True)
    task = Task(
        model=MODEL,
        parameters=parameters,
        prompts=[Prompt(np.array(WORDS[:3], np.int32), None)],
        samplings=[sampling],
        shape=ChatShape(writer) if chat else CompletionShape(writer),
        request_id="r",
        logprobs=rich,
        tokens=TokenFields(ids=rich),
    )
    generation = Generation(lambda numbers, *, stopped=False: None, lambda _generation: None)
    call = Call(task, generation, cast(CoreLink, Link()), TimeLimit(None))
    return call, ChunkWriter(call.id, call.created, "m", task.shape, False, call.told_once)


def events_of(parts: list[bytes]) -> list[dict[str, Any]]:
    lines = b"".join(parts).decode().split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def text_of(event: dict[str, Any]) -> str:
    (told,) = event["choices"]
    return str(told["text"] if "text" in told else told["delta"].get("content", ""))


Act = int | str
"""A token for this choice, or the connection fills, or it has room again."""


@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(st.one_of(st.integers(0, 1), st.sampled_from(["fill", "room"])), max_size=40),
    chat=st.booleans(),
    rich=st.booleans(),
)
def test_what_a_full_connection_holds_up_comes_as_one_event_of_each_choice(
    acts: list[Act], chat: bool, rich: bool
) -> None:
    connection, held, expected = Connection(), set[int](), 0
    said: tuple[list[int], list[int]] = ([], [])

    async def follow() -> list[bytes]:
        nonlocal expected
        call, writer = new_call(chat=chat, n=2, rich=rich)
        streams = call.generation.streams[:]
        last = asyncio.create_task(Delivery(call, writer, connection).last_events())
        await asyncio.sleep(0)
        for act in acts:
            if act == "fill":
                connection.is_full = True
            elif act == "room":
                expected += len(held)
                held.clear()
                connection.make_room()
            else:
                choice = int(act)
                token = WORDS[len(said[choice]) % len(WORDS)]
                said[choice].append(token)
                streams[choice].put([token], ([token], [-0.5]) if rich else None)
                if connection.is_full:
                    held.add(choice)
                else:
                    expected += 1
            assert sum(bool(text_of(event)) for event in events_of(connection.parts)) == expected
        for stream in streams:
            stream.ended = Ended(stream.number, EndReason.LENGTH)
            stream.tell()
        connection.make_room()
        return [*connection.parts, await last]

    events = events_of(asyncio.run(follow()))
    for choice in (0, 1):
        own_events = [event for event in events if event["choices"][0]["index"] == choice]
        own = [event["choices"][0] for event in own_events]
        text = "".join(map(text_of, own_events))
        assert text == MODEL.tokenizer.detokenizers.create(WORDS[:3], True).push(said[choice])
        assert [told["finish_reason"] for told in own].count("length") == 1
        if rich:
            assert [i for told in own for i in told.get("token_ids", [])] == said[choice]
            entries = [told["logprobs"] for told in own if told["logprobs"]]
            assert sum(len(e["content"] if chat else e["tokens"]) for e in entries) == len(said[choice])


def test_a_failure_is_told_when_the_connection_has_room_again_or_not() -> None:
    async def follow() -> bytes:
        call, writer = new_call(chat=False, n=1, rich=False)
        connection = Connection()
        (stream,) = call.generation.streams
        last = asyncio.create_task(Delivery(call, writer, connection).last_events())
        await asyncio.sleep(0)
        connection.is_full = True
        stream.put(WORDS[:2])
        assert call.generation.sending and call.generation.unsent_tokens == 2 and not connection.parts
        call.generation.fail(internal())
        return await last

    assert b'"error"' in asyncio.run(follow())


@given(st.lists(st.lists(st.integers(0, 5), unique=True), min_size=1, max_size=6))
def test_tokens_of_several_iterations_by_stream(iterations: list[list[int]]) -> None:
    expected: dict[int, list[int]] = {}
    messages = []
    for i, numbers in enumerate(iterations):
        tokens = [100 * i + number for number in numbers]
        messages.append(Tokens(np.array(numbers, np.uint32), np.array(tokens, np.int32)))
        for number, token in zip(numbers, tokens, strict=True):
            expected.setdefault(number, []).append(token)
    shared = list(tokens_by_stream(messages))
    assert dict(shared) == expected and len(shared) == len(expected)


def test_a_body_writer_over_a_connection_that_breaks() -> None:
    """It tells of room once the client reads, and a connection that has gone harms nobody."""

    async def follow() -> None:
        loop, made = asyncio.get_running_loop(), asyncio.Queue[tuple[asyncio.Transport, FlowControl]]()

        class Server(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                flow = FlowControl(cast(asyncio.Transport, transport))
                self.pause_writing, self.resume_writing = flow.pause_writing, self.resume
                self.flow = flow
                made.put_nowait((cast(asyncio.Transport, transport), flow))

            def resume(self) -> None:
                self.flow.resume_writing()
                writer.tell_room()

        server = await loop.create_server(Server, "127.0.0.1", 0)
        async with server:
            reader, other = await asyncio.open_connection(*server.sockets[0].getsockname())
            transport, flow = await made.get()
            writer, room = BodyWriter(transport, flow), asyncio.Event()
            writer.open(room.set)
            written = 0
            while not writer.is_full:
                writer.write(b"x" * 100_000)
                written += 1
            assert await reader.readexactly(written * len(b"186a0\r\n\r\n" + b"x" * 100_000))
            await asyncio.wait_for(room.wait(), 60)
            assert not writer.is_full
            transport.abort()
            writer.write(b"more")
            writer.close()
            await asyncio.sleep(0)
            writer.open(room.set)
            writer.close()
            other.close()

    uvloop.run(follow())
