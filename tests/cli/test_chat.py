"""`gilir chat`: in a pipe, in a terminal, and what becomes of an answer that is stopped."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scheduler_svc.cli import main
from scheduler_svc.cli.chat.command import Dialogue, Screen
from scheduler_svc.cli.chat.conversation import Conversation, Piece
from scheduler_svc.cli.connection import Connection
from scheduler_svc.cli.errors import CommandError
from tests.cli.in_terminal import InTerminal
from tests.cli.stub_server import Reply, Stub, chat_events

CHAT = "POST /v1/chat/completions"
PIECES = [{"reasoning_content": "Hm. "}, {"reasoning": "So."}, {"content": "Hello"}, {"content": ", you."}]


def answers(stub: Stub, *pieces: dict[str, str], finish_reason: str = "stop") -> None:
    stub.replies[CHAT] = lambda _: (200, chat_events(pieces or PIECES, finish_reason))


def test_in_a_pipe_the_answer_alone_comes_out(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(stub)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi there\n"))
    flags = ["--system", "Be brief.", "--temperature", "0.5", "--max-tokens", "9", "--extra", '{"top_k": 3}']
    assert main(["chat", "--url", stub.url, *flags]) == 0
    assert capsys.readouterr() == ("Hello, you.\n", "")
    route, body = stub.asked[-1]
    assert route == CHAT and body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi there"},
    ]
    assert (body["temperature"], body["max_tokens"], body["top_k"], body["stream"]) == (0.5, 9, 3, True)
    assert "seed" not in body and body["model"] == "m"


def test_an_empty_pipe_an_error_in_the_stream_and_a_cut_answer_are_told(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "stdin is empty" in fails("chat", "--url", stub.url)
    stub.replies[CHAT] = lambda _: (200, iter([{"error": {"message": "out of time"}}]))
    assert fails("chat", "hi", "--url", stub.url) == "out of time"
    answers(stub, finish_reason="length")
    assert main(["chat", "hi", "--url", stub.url]) == 0
    assert "was cut off" in capsys.readouterr().err


def endless(left: threading.Event) -> Iterator[Any]:
    """A chat that ends when its reader has gone."""
    try:
        yield from chat_events({"content": "on "} for _ in itertools.count())
    finally:
        left.set()


@pytest.fixture
def conversation(stub: Stub) -> Iterator[Conversation]:
    with Connection(stub.url) as connection:
        yield Conversation(connection, "m")


def test_a_stopped_answer_ends_the_request_and_stays_as_far_as_it_came(stub: Stub, conversation: Conversation) -> None:
    left = threading.Event()
    stub.replies[CHAT] = lambda _: (200, endless(left))
    pieces = conversation.answer("go")
    assert [next(pieces), next(pieces)] == [Piece("on ", False)] * 2
    pieces.close()
    assert left.wait(60)
    assert conversation.messages == [{"role": "user", "content": "go"}, {"role": "assistant", "content": "on on "}]


def test_a_conversation_remembers_and_takes_back(stub: Stub, conversation: Conversation) -> None:
    answers(stub)
    assert [piece.is_reasoning for piece in conversation.answer("one")] == [True, True, False, False]
    assert (conversation.tokens, conversation.finish_reason) == (4, "stop")
    list(conversation.answer("two"))
    told = [(message["role"], message["content"]) for message in stub.asked[-1][1]["messages"]]
    assert told == [("user", "one"), ("assistant", "Hello, you."), ("user", "two")]
    assert conversation.take_back() == "two" and len(conversation.messages) == 2
    stub.refuse(CHAT, 429, "the queue is full")
    with pytest.raises(CommandError, match="the queue is full"):
        list(conversation.answer("three"))
    assert len(conversation.messages) == 2


def test_the_commands_of_a_dialogue(
    stub: Stub, conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replies(body: Any) -> Reply:
        return 200, chat_events([{"content": f"answer {len(body['messages'])}"}])

    stub.replies[CHAT] = replies
    stub.say("GET /v1/models", 200, {"data": [{"id": "m"}, {"id": "other"}]})
    lines = iter(["hi", "/retry", "more", "/system Be brief.", "/system", "hi", "/model other", "/model no", "/model"])
    more = iter(["", "/nonsense", "/new", "/retry", "/help", "/quit", "not asked"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or next(more))
    Dialogue(conversation, Screen()).run()
    out, err = capsys.readouterr()
    shown = [line for line in out.splitlines() if line.startswith("answer")]
    assert shown == ["answer 1", "answer 1", "answer 3", "answer 2"]
    assert (
        "Be brief." in out and "no command /nonsense" in out and "nothing was answered yet" in out and "/retry " in out
    )
    assert conversation.model == "other" and "there is no model 'no'" in err and "m\nother\n" in out
    assert next(more) == "not asked"


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(stub: Stub) -> None:
    stub.replies[CHAT] = lambda body: (200, thinks_on(body))
    with InTerminal.gilir("chat", "--url", stub.url) as terminal:
        terminal.wait_for("> ")
        terminal.press("hi\r")
        terminal.wait_for("\033[2mHm")  # dim
        terminal.wait_for("on on ")
        assert "\033" not in terminal.shown.partition("on")[0].replace("\033[0m", "").replace("\033[2m", "")
        terminal.interrupt()
        terminal.wait_for("stopped")
        assert stub.was_left.wait(60)
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for("Ctrl-D ends the chat")
        terminal.wait_for("> ")
        terminal.press("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def thinks_on(_body: Any) -> Iterator[Any]:
    """For ever, but not as fast as the machine can: who reads has other things to do."""

    def pieces() -> Iterator[dict[str, str]]:
        yield {"reasoning_content": "Hm"}
        yield {"content": "\033[2J"}
        while True:
            yield {"content": "on "}
            time.sleep(0.002)

    return chat_events(pieces())
