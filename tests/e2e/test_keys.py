"""CURVE between the services: only executors whose public key the scheduler knows can attach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq

from common.curve import create_key_pair
from executor_svc.fake import FakeExecutor
from executor_svc.fake_model import card_from_folder
from executor_svc.sockets import read_key


def test_only_known_keys_attach(start: Callable[..., Any], tmp_path: Path, model_folder: Path) -> None:
    known = tmp_path / "known"
    server_public, server_secret = create_key_pair(tmp_path, "scheduler")
    _, known_secret = create_key_pair(known, "executor")
    _, strange_secret = zmq.curve_keypair()
    stack = start("--curve-secret-key", str(server_secret), "--curve-client-keys", str(known))
    server_key, card = read_key(str(server_public), "public"), card_from_folder(model_folder, "model")

    def executor(name: str, **keys: bytes) -> FakeExecutor:
        return FakeExecutor(stack.services.executor_address, name=name, model=card, **keys)

    with ExitStack() as running:
        for other in (executor("keyless"), executor("stranger", server_key=server_key, secret_key=strange_secret)):
            running.enter_context(other)
        friend = executor("friend", server_key=server_key, secret_key=read_key(str(known_secret), "secret"))
        running.enter_context(friend)
        stack.ready()
        assert stack.complete([5, 6, 7], 5).status_code == 200
        assert stack.metric("gilir_lanes") == 1
        assert "executor=friend" in stack.scheduler.log.read_text() and len(friend.epochs) == 1
