"""A frontend in this process, in front of a scripted core, and what it says of itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
from fake_core import FakeCore
from fastapi.testclient import TestClient
from frontend_service import BYTE_LEVEL, wait_until
from tokenizers_for_tests import TOOL_CHAT, byte_level, card

from scheduler_svc.frontend.app import create_app
from scheduler_svc.frontend.settings import FrontendSettings

MESSAGES = [{"role": "user", "content": "Hello"}]
WINDOW = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "CreateCompletion": ("/v1/completions", {"prompt": "Hello"}),
    "CreateChatCompletion": ("/v1/chat/completions", {"messages": MESSAGES}),
    "CreateResponse": ("/v1/responses", {"input": "Hello"}),
    "TokenizeText": ("/tokenize", {"prompt": "Hello"}),
    "TokenizeMessages": ("/tokenize", {"messages": MESSAGES}),
    "Detokenize": ("/detokenize", {"tokens": [5]}),
    "CreateBatch": ("/v1/batches", WINDOW),
}
"""For each body of the description: its path, and a right one."""


class World:
    """A frontend in this process with a scripted core."""

    def __init__(self, client: TestClient, core: FakeCore) -> None:
        self.client, self.core = client, core
        self.document: dict[str, Any] = client.get("/openapi.json").json()
        self.schemas: dict[str, Any] = self.document["components"]["schemas"]

    def validator(self, schema: dict[str, Any]) -> Any:
        return jsonschema_rs.validator_for({**schema, "components": {"schemas": self.schemas}})


@contextmanager
def open_world(folder: Path) -> Iterator[World]:
    """Start it, with batches."""
    address = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
    core = FakeCore(address, [card(BYTE_LEVEL, byte_level(), TOOL_CHAT)])
    settings = FrontendSettings(core=address, batch_dir=folder / "batches", max_streams_per_request=128)
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        wait_until(lambda: client.get("/health").status_code == 200 and client.get("/v1/models").json()["data"] != [])
        yield World(client, core)
    core.close()
