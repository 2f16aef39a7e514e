"""`gilir chat`: a conversation in the terminal; in a pipe, one question from stdin and its answer on stdout."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from typing import Any

from common.command_parser import command_parser
from scheduler_svc.cli.chat.conversation import Conversation
from scheduler_svc.cli.connection import Connection, chosen_model, models_of
from scheduler_svc.cli.errors import CommandError
from scheduler_svc.cli.parsing import add_server, key_of, positive
from scheduler_svc.cli.terminal import plain_console, printable

DESCRIPTION = """Chats with a model of any server of the OpenAI API. Answers stream; what the model reasons is dim.
Ctrl-C stops an answer, Ctrl-D ends the chat. With a message, or with one from a pipe, it is answered and that is all;
into a pipe goes the answer alone, without the reasoning."""
EXAMPLES = """
  gilir chat
  gilir chat --system "You are brief." --temperature 0.2
  gilir chat "Tell me a story." --max-tokens 100
  git diff | gilir chat --system "Write a commit message for this diff."
  gilir chat --url http://gpu-host:8000 --model Qwen3-0.6B --extra '{"top_k": 20}'
"""
COMMANDS = """/new            forget what was said
/retry          another answer to the last question
/system [TEXT]  another system message, and begin anew; without a text: show it
/model [NAME]   ask another model; without a name: list them
/quit           end, as Ctrl-D"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    made.add_argument("message", nargs="?", help="one question; without it, a conversation")
    add_server(made)
    made.add_argument("--model", help="which of the server's models (the first)")
    made.add_argument("--system", default="", metavar="TEXT", help="the system message")
    made.add_argument("--temperature", type=float, metavar="T", help="else the model's own, or 1")
    made.add_argument("--top-p", type=float, metavar="P")
    made.add_argument("--max-tokens", type=positive, metavar="N", help="of an answer")
    made.add_argument("--seed", type=int, metavar="N", help="the same answer each time")
    made.add_argument("--extra", type=_object, default={}, metavar="JSON", help="further fields of the request")
    return made


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return content


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0; 1 with one plain line where the server does not answer."""
    options = parser(prog).parse_args(arguments)
    names = ("temperature", "top_p", "max_tokens", "seed")
    parameters = {name: value for name in names if (value := getattr(options, name)) is not None} | options.extra
    message = options.message
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
        if not message:
            raise CommandError("nothing was asked: stdin is empty")
    with Connection(options.url, key_of(options)) as connection:
        model = chosen_model(connection, options.model)
        conversation = Conversation(connection, model, options.system, parameters)
        screen = Screen()
        if message is not None:
            screen.show(conversation, message)
        else:
            Dialogue(conversation, screen).run()
    return 0


class Screen:
    """Shows answers: styled on a terminal, plain in a pipe."""

    def __init__(self) -> None:
        self._console = plain_console()

    def say(self, text: str) -> None:
        """A line of our own."""
        self._console.print(text, style="dim")

    def show(self, conversation: Conversation, question: str) -> None:
        """One answer, as it comes. KeyboardInterrupt ends the request, and goes on to the caller."""
        was_reasoning, ends_line = False, True
        began = time.monotonic()
        with contextlib.closing(conversation.answer(question)) as pieces:
            try:
                for piece in pieces:
                    if piece.is_reasoning and not self._console.is_terminal:
                        continue
                    if was_reasoning and not piece.is_reasoning:
                        self._console.print("" if ends_line else "\n")
                    was_reasoning = piece.is_reasoning
                    # A terminal would do what control characters say; a file gets what the model wrote.
                    text = printable(piece.text) if self._console.is_terminal else piece.text
                    ends_line = text.endswith("\n") if text else ends_line
                    self._write(text, dim=piece.is_reasoning)
            finally:
                if not ends_line:
                    self._write("\n")
        if conversation.finish_reason == "length":
            self.warn("the answer was cut off: it has reached --max-tokens, or the model's context is full")
        if self._console.is_terminal and conversation.tokens:
            took = time.monotonic() - began
            self.say(f"{conversation.tokens} tokens in {took:.1f} s")

    def warn(self, text: str) -> None:
        print(text, file=sys.stderr)

    def _write(self, text: str, *, dim: bool = False) -> None:
        if self._console.is_terminal:
            self._console.print(text, style="dim" if dim else None, end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()


class Dialogue:
    """Question after question, until the end of the input."""

    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self._conversation, self._screen = conversation, screen

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lines can be edited, and called back
        self._screen.say(f"{self._conversation.model} at {self._conversation.connection.url}; /help tells the commands")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                self._screen.say("Ctrl-D ends the chat")
                continue
            try:
                if line == "/quit":
                    return
                question = self._obey(line) if line.startswith("/") else line
                if question:
                    self._screen.show(self._conversation, question)
            except KeyboardInterrupt:
                self._screen.say("stopped")
            except CommandError as error:
                self._screen.warn(f"error: {error}")

    def _obey(self, line: str) -> str:
        """Do what a command says. Returns a question that is to be asked; empty where there is none."""
        conversation = self._conversation
        name, _, rest = line.partition(" ")
        match name, rest.strip():
            case "/new", _:
                conversation.messages.clear()
            case "/retry", _:
                question = conversation.take_back()
                if not question:
                    self._screen.say("nothing was answered yet")
                return question
            case "/system", "":
                self._screen.say(conversation.system or "there is none")
            case "/system", text:
                conversation.system = text
                conversation.messages.clear()
            case "/model", "":
                self._screen.say("\n".join(models_of(conversation.connection)))
            case "/model", model:
                conversation.model = chosen_model(conversation.connection, model)
            case "/help", _:
                self._screen.say(COMMANDS)
            case _:
                self._screen.say(f"there is no command {name}; /help tells them")
        return ""
