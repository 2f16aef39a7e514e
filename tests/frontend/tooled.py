"""A frontend in this process whose models' templates know tools, and write calls in several formats."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_core import Answer, FakeCore
from fastapi.testclient import TestClient
from frontend_service import wait_until
from tokenizers import Tokenizer
from tokenizers_for_tests import CHATML, TOOL_CHAT, byte_level, card

from common.wire import EndReason
from scheduler_svc.frontend.app import create_app
from scheduler_svc.frontend.settings import FrontendSettings

THINKS = "{# </think> #}" + TOOL_CHAT.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
CLOSED = "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
MAY_THINK = TOOL_CHAT.replace("assistant\\n' }}", "assistant\\n' }}" + CLOSED)
"""As Qwen 3: the model begins its reasoning itself, unless it is told not to think."""
LLAMA3 = TOOL_CHAT.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
MISTRAL = TOOL_CHAT.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
UNTOLD = TOOL_CHAT.replace("<tool_call>", "CALL ").replace("</tool_call>", "")
TEMPLATES = {
    "hermes": TOOL_CHAT,
    "thinks": THINKS,
    "may think": MAY_THINK,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "untold": UNTOLD,
}
TEMPLATES |= {"no tools": CHATML, "two templates": CHATML}
TOOL_TEMPLATES = {"two templates": TOOL_CHAT}


def made() -> tuple[Tokenizer, dict[str, object]]:
    """A tokenizer to which the markup of two formats is special, and reasoning's tags are tokens; not so Hermes'."""
    tokenizer, config = byte_level()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>"])
    return tokenizer, config


TOKENIZER = made()[0]


class Tooled:
    """A frontend in this process, in front of a scripted core."""

    def __init__(self, client: TestClient, core: FakeCore) -> None:
        self.client, self.core = client, core

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)


class AllCompile:
    """Takes the place of the process that tries grammars, which starts slowly."""

    async def verdict(self, *_grammar: object) -> str:
        return ""

    def close(self) -> None: ...


@contextmanager
def opened(folder: Path, names: Iterable[str], **settings: Any) -> Iterator[Tooled]:
    address = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
    cards = [
        card(name, made(), TEMPLATES[name], tool_chat_template=TOOL_TEMPLATES.get(name, ""), max_model_len=4096)
        for name in names
    ]
    core = FakeCore(address, cards)
    app = create_app(FrontendSettings(core=address, **settings))
    app.state.frontend.grammars = AllCompile()
    with TestClient(app, base_url="http://localhost") as client:
        wait_until(lambda: len(client.get("/v1/models").json()["data"]) == len(core.models))
        yield Tooled(client, core)
    core.close()


def says(service: Tooled, text: str, reason: EndReason = EndReason.EOS) -> None:
    """The model writes this, one token an iteration."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    service.core.answer(Answer(tokens, reason=reason))


def rendered(service: Tooled) -> str:
    return TOKENIZER.decode(service.core.requests[-1].prompt.tolist(), skip_special_tokens=False)
